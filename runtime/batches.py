"""An endless iterator of batches whose position moves with the rank and goes back with a block."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trainmover.runtime import rng
from trainmover.runtime.loaders import adapt


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A batch with what drawing it led to; `rng` is None where batches are made elsewhere."""

    batch: Any
    epoch: int
    after: bytes
    rng: rng.RngState | None


class Batches:
    """`ctx.batches`: `next(data)` and `for x in data` never end; one object is its own iterator.

    `source` is a loader, or a function without arguments that makes one. Shuffling and what worker
    processes draw depend on (seed, epoch, batch number) alone; datasets that worker processes hold
    must draw from python's, numpy's or torch's global generators. `guard` is called at every batch
    and raises where none may be drawn. Batches of an undone block are handed out again as the same
    objects: do not change them in place. Raises TypeError for a source without a position.
    """

    def __init__(self, source: Any, seed: int, guard: Callable[[], None]) -> None:
        self._source, self._seed, self._guard = source, seed, guard
        self._makes = callable(source) and (
            isinstance(source, type) or not hasattr(source, "__iter__")
        )
        self._loader = adapt(source() if self._makes else source, seed)
        self._epoch = self._opened_epoch = 0
        self._position: bytes | None = None  # not asked yet
        self._opened: bytes | None = None
        self._taken: list[_Drawn] = []  # in this block
        self._ahead: deque[_Drawn] = deque()  # drawn in an undone block

    def rebuild(self) -> None:
        """Make the loader again where a function made it: the rank has become known."""
        if self._makes:
            self._loader = adapt(self._source(), self._seed)
            self._position = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._guard()
        if self._ahead:
            drawn = self._ahead.popleft()
            if drawn.rng is not None:
                rng.restore(drawn.rng)  # as the first drawing left it
        else:
            drawn = self._draw()
        self._taken.append(drawn)
        self._position, self._epoch = drawn.after, drawn.epoch
        return drawn.batch

    @property
    def epoch(self) -> int:
        """Which pass over the data the last batch came from, from 0."""
        return self._epoch

    def open(self) -> None:
        """A block begins: what was drawn before it is used and forgotten."""
        self._taken.clear()
        self._opened, self._opened_epoch = self.position(), self._epoch

    def undo(self) -> None:
        """The block is undone: what was drawn in it comes again, in order."""
        self._ahead.extendleft(reversed(self._taken))
        self._taken.clear()
        self._position, self._epoch = self._opened, self._opened_epoch

    def position(self) -> bytes:
        """The next batch to hand out, for `load_position` on another rank."""
        if self._position is None:
            self._position = self._loader.where()
        return self._position

    def load_position(self, position: bytes) -> None:
        """Goes there and makes the iterator (and its workers) at once.

        Raises ValueError where the loader is not built as at the donor.
        """
        self._taken.clear()
        self._ahead.clear()
        self._loader.go(position)
        self._position, self._epoch = position, self._loader.epoch

    def _draw(self) -> _Drawn:
        batch = self._loader.draw()
        state = rng.capture() if self._loader.draws_here else None
        return _Drawn(batch, self._loader.epoch, self._loader.where(), state)
