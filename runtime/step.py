"""One block of `ctx.steps` as the script sees it, whether a job protects it or not."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self, SupportsFloat

from torch import Tensor
from torch.optim.optimizer import Optimizer


class Wishes(Protocol):
    """What user code asked for since ranks last agreed; outlives a block."""

    stop_wanted: bool
    reported: dict[str, float]


class Step(ABC):
    """One block. User code enters it once and reads `committed` afterwards."""

    def __init__(self, wishes: Wishes, number: int, *, closing: bool, shadow: bool) -> None:
        self.number = number
        """0-based; the same number comes again when the block was undone."""
        self.closing = closing
        """One block more than updates: for the last evaluation and save."""
        self.shadow = shadow
        """Nothing of this block stays; nobody else sees it."""
        self.committed = False
        self.entered = False
        self.stopping = False
        self._wishes = wishes

    def stop(self) -> None:
        """End the loop after this step on every rank: rides on the vote (the next one, if this
        step's is over)."""
        if not self.shadow:
            self._wishes.stop_wanted = True

    def report(self, **numbers: SupportsFloat) -> None:
        """Progress and metrics, averaged over the ranks in the next vote; no collective.

        Takes floats and one-element tensors (`loss=loss`). Ignored in a block that is undone.
        """
        if not self.shadow:
            self._wishes.reported.update({k: _number(v) for k, v in numbers.items()})

    @abstractmethod
    def ready(self, optimizer: Optimizer | None = None) -> None:
        """Vote now: for engines with an optimizer of their own. Called by the gate otherwise.

        Blocks until every rank has come here.
        """

    def __enter__(self) -> Self:
        if self.entered:
            raise RuntimeError("a step is entered once; the next one comes from ctx.steps")
        self.entered = True
        self._open()
        return self

    @abstractmethod
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> bool | None: ...

    @abstractmethod
    def _open(self) -> None:
        """The block begins."""


def give(step: Step) -> Iterator[Step]:
    """Hands it to user code. Raises RuntimeError when it comes back without having been entered."""
    yield step
    if not step.entered:
        raise RuntimeError("each step of ctx.steps is entered: `with step: ...`")


def _number(value: SupportsFloat) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)
