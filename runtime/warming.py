"""A standby's runs of `train`: one after the other on a machine, behind what trains there, and not
for ever."""

import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path

from trainmover.runtime.priority import Lowered
from trainmover.runtime.seat import Seat

WARM_S = 1800.0
"""For one role class: imports and a compilation of the largest model are done within it."""
LOCK = "warm-up.lock"


class Turn:
    """The turn of this worker among those of its machine that want to warm up."""

    def __init__(self, directory: Path) -> None:
        self._file = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def take(self) -> bool:
        """False while it is another's. Does not block."""
        try:
            # Not flock: processes that `train` forks would hold that on.
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def give_back(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN)


class WarmUp:
    """One of them, from the start until `end`, or until the seat has something more urgent.

    Low priority and the turn end with it. `late` is called in a thread of its own if neither
    comes within `WARM_S`.
    """

    def __init__(self, turn: Turn, seat: Seat, late: Callable[[], None]) -> None:
        self._turn, self._seat, self._late = turn, seat, late
        self._over = False
        self._lowered = Lowered()
        threading.Thread(target=self._watch, name="tm-warm-up", daemon=True).start()

    def end(self) -> None:
        """Does nothing the second time."""
        with self._seat.cond:
            if self._over:
                return
            self._over = True
            self._seat.notify()
        self._lowered.restore()
        self._turn.give_back()

    def _watch(self) -> None:
        """Who takes a rank does the rest of its step at the full priority."""
        if self._seat.wait(lambda: self._over or self._seat.called, WARM_S):
            self.end()
        else:
            self._late()
