"""Stops this process at exactly the point of a step that a fault names.

A worker that joined at step T does not fire the faults of step T: it is what came after them.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path

from trainmover.schemas.fault import Fault


def parse_all(text: str) -> list[Fault]:
    """`;`-separated faults, or `@FILE` with one a line (none while there is no such file)."""
    if text.startswith("@"):
        path = Path(text[1:])
        text = ";".join(path.read_text().split()) if path.exists() else ""
    return [Fault.parse(part) for part in text.split(";") if part]


class Faults:
    """The faults meant for this worker; `arm` opens a step, `hit` fires at a point of it."""

    def __init__(
        self,
        text: str,
        worker: str,
        announce: Callable[[Fault], None],
        cut: Callable[[], None],
    ) -> None:
        self._text, self._worker = text, worker
        self.any = bool(text)
        """A field: it is asked seven times a step."""
        self._announce, self._cut = announce, cut
        self._fired: set[Fault] = set()
        self._armed: dict[str, Fault] = {}

    def arm(self, rank: int, step: int, joined_at: int | None) -> None:
        """A file of faults is read again at each step, so that a drill can go on and on."""
        self._armed = {
            fault.at: fault
            for fault in parse_all(self._text)
            if fault not in self._fired and self._meant(fault, rank, step, joined_at)
        }

    def _meant(self, fault: Fault, rank: int, step: int, joined_at: int | None) -> bool:
        if fault.worker is not None:
            return fault.worker == self._worker and fault.step in (None, step)
        return fault.rank == rank and fault.step == step and joined_at != step

    def armed(self, at: str) -> Fault | None:
        return self._armed.get(at)

    def hit(self, at: str) -> None:
        fault = self._armed.pop(at, None)
        if fault is None:
            return
        self._fired.add(fault)
        self._announce(fault)
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "cut":
                self._cut()
