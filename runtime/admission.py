"""Which collectives may run now, and which only pretend to; the step loop sets it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class Mode(Enum):
    """What happens to a collective."""

    SETUP = "setup"
    """Before the first step: it runs."""
    ECHO = "echo"
    """On standbys and joiners that set up: groups answer by themselves (design/standby.md)."""
    BLOCK = "block"
    """Inside `with step:`: it runs."""
    CLOSED = "closed"
    """Between blocks and after the loop: refused."""


@dataclass(frozen=True)
class Issued:
    """One collective as a trace records it."""

    group: str
    op: str
    dtype: str
    shape: tuple[int, ...]


@dataclass
class Admission:
    """Steered by the step loop, asked by every group for every collective."""

    mode: Mode = Mode.SETUP
    finished: bool = False
    """After the loop: barriers return at once, since user code ends with them out of habit."""
    trace: list[Issued] | None = field(default=None)
    """While a list: everything admitted is appended, for shadow steps to compare."""

    def admit_group(self, ranks: Sequence[int]) -> None:
        """Raises RuntimeError once set-up is over."""
        if self.mode in (Mode.BLOCK, Mode.CLOSED) or self.trace is not None:
            raise RuntimeError(
                f"expected process groups to be made in set-up, got one of ranks {list(ranks)} "
                "after it: who takes over a rank later has the groups of its own set-up only. "
                "Make it before ctx.steps()"
            )

    def admit(self, issued: Issued) -> Mode:
        """How to treat this collective; raises RuntimeError where none may stand."""
        if self.trace is not None:
            self.trace.append(issued)
        if self.mode is not Mode.CLOSED:
            return self.mode
        if self.finished and issued.op == "barrier":
            return Mode.ECHO
        raise RuntimeError(
            f"expected collectives in set-up or inside `with step:` blocks, got {issued.op} on "
            f"group {issued.group} outside: what communicates must be undone and done again with "
            "its step. Move it into the block, before optimizer.step() (an average to be shown is "
            "step.report(loss=loss), without a collective):\n"
            "    for step in ctx.steps(n):\n"
            "        with step:\n"
            f"            ...  # {issued.op} here"
        )
