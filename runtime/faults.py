"""Faults as data: `kill:rank=1,step=5,at=backward` stops this process at exactly that point.

A worker that joined at step T does not fire the faults of step T: it is what came after them.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

POINTS = (
    "forward",
    "backward",
    "frame",
    "extras",
    "vote",
    "result",
    "optimizer",
    "commit",
    "between",
    "end",
)
"""In the order of a step. `frame`: inside a frame of an all_reduce; `extras`: extras sent, not yet
voted; `vote`: voted, no result yet; `result`: the result is known here alone; `optimizer`: half of
the parameters are stepped; `commit`: before the block's end; `between`: after it; `end`: in the
code after the loop."""
KINDS = ("kill", "stop", "cut")


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    rank: int
    step: int
    at: str = "forward"
    bytes: int = 1000
    """For `frame`: after how many bytes of it."""

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Raises ValueError that shows the form and the known kinds and points."""
        kind, _, rest = text.partition(":")
        fields = dict(part.partition("=")[::2] for part in rest.split(",") if part)
        try:
            known = {"rank", "step", "at", "bytes"}
            if (
                kind not in KINDS
                or set(fields) - known
                or fields.get("at", "forward") not in POINTS
            ):
                raise ValueError
            return cls(
                kind=kind,
                rank=int(fields["rank"]),
                step=int(fields["step"]),
                at=fields.get("at", "forward"),
                bytes=int(fields.get("bytes", "1000")),
            )
        except (KeyError, ValueError):
            raise ValueError(
                f"a fault is KIND:rank=R,step=S[,at=POINT] with KIND of {', '.join(KINDS)} and "
                f"POINT of {', '.join(POINTS)}; got {text!r}"
            ) from None


class Faults:
    """The faults meant for this worker; `arm` opens a step, `hit` fires at a point of it."""

    def __init__(
        self, text: str, announce: Callable[[Fault], None], cut: Callable[[], None]
    ) -> None:
        self._faults = [Fault.parse(part) for part in text.split(";") if part]
        self._announce, self._cut = announce, cut
        self._armed: dict[str, Fault] = {}

    def __bool__(self) -> bool:
        return bool(self._faults)

    def arm(self, rank: int, step: int, joined_at: int | None) -> None:
        self._armed = {
            fault.at: fault
            for fault in self._faults
            if fault.rank == rank and fault.step == step and joined_at != step
        }

    def armed(self, at: str) -> Fault | None:
        return self._armed.get(at)

    def hit(self, at: str) -> None:
        fault = self._armed.pop(at, None)
        if fault is None:
            return
        self._faults.remove(fault)
        self._announce(fault)
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "cut":
                self._cut()
