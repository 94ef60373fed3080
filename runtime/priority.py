"""The priority of this process, lowered for a while: only where it may be raised again."""

import os
import threading
from pathlib import Path

LOW = 10
"""Nice value: what runs at 0 gets nine times as much of a core."""


class Lowered:
    """All threads are at nice `LOW` from the start until `restore`, those made meanwhile too.

    Does nothing where the system would not let them back.
    """

    def __init__(self) -> None:
        self._before = os.getpriority(os.PRIO_PROCESS, 0)
        self._lowered = self._before < LOW and _may_return_to(self._before)
        if self._lowered:
            _set_all(LOW)

    def restore(self) -> None:
        """Every thread of the process back to what the caller's was. Once is enough."""
        if self._lowered:
            self._lowered = False
            _set_all(self._before)


def _may_return_to(nice: int) -> bool:
    """Tried in a thread of its own: a capability alone does not say so inside a container."""
    allowed = []

    def there_and_back() -> None:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, LOW)
        try:
            os.setpriority(os.PRIO_PROCESS, thread, nice)
        except PermissionError:
            return
        allowed.append(True)

    trial = threading.Thread(target=there_and_back)
    trial.start()
    trial.join()
    return bool(allowed)


def _set_all(nice: int) -> None:
    """A thread inherits the value of the one that makes it, so looks again until all have it."""
    while others := [thread for thread in threads() if of(thread) not in (nice, None)]:
        for thread in others:
            try:
                os.setpriority(os.PRIO_PROCESS, thread, nice)
            except ProcessLookupError:  # it has just ended
                continue


def threads() -> list[int]:
    """Of this process, as the system names them."""
    return [int(task.name) for task in Path("/proc/self/task").iterdir()]


def of(thread: int) -> int | None:
    """Nice value; None: it has ended."""
    try:
        return os.getpriority(os.PRIO_PROCESS, thread)
    except ProcessLookupError:
        return None
