"""The one switch that ends a generation for every link of the process."""

import os
import threading
from collections.abc import Callable


class Revoked(Exception):
    """The generation of this operation has ended; nothing of it may be sent or written."""


class Fence:
    """Says which generation may communicate, and ends it at once.

    Starts revoked at generation 0: nothing moves before the first `open`. Whoever copies received
    bytes into memory of the user holds a lock registered with `shield` and calls `check` under
    it; `revoke` takes each of them once, so when it returns no such copy is under way. Thread safe.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.revoked = True
        self.cause = "the first generation is not open yet"
        self.wake_fd = os.eventfd(1, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable while revoked, so that every poll loop wakes at once."""
        self._lock = threading.RLock()
        self._shields: set[threading.Lock] = set()
        self._watchers: list[Callable[[], None]] = []

    def check(self, generation: int) -> None:
        """Raise `Revoked` unless `generation` may communicate now. Never blocks."""
        if self.revoked or self.generation != generation:
            raise Revoked(
                f"generation {generation} has ended "
                f"(the fence stands at {self.generation}: {self.cause or 'open'})"
            )

    def open(self, generation: int) -> None:
        """Let `generation` communicate; opening it twice changes nothing.

        Raises ValueError for a generation that is older, or was revoked before.
        """
        with self._lock:
            if generation == self.generation and not self.revoked:
                return
            if generation <= self.generation:
                raise ValueError(
                    f"expected a generation above {self.generation}, got {generation}: "
                    "a generation that has ended is never opened again"
                )
            self.generation, self.revoked, self.cause = generation, False, ""
            os.eventfd_read(self.wake_fd)

    def revoke(self, generation: int, cause: str) -> bool:
        """End `generation`; False when another one is current or it has ended before.

        Blocks for the copy of at most one frame per link. When it returns, nothing of the
        generation writes into memory of the user any more (design/groups.md, no late writes).
        """
        with self._lock:
            if generation != self.generation or self.revoked:
                return False
            self.revoked, self.cause = True, cause
            os.eventfd_write(self.wake_fd, 1)
            for lock in self._shields:
                with lock:
                    pass
            for watcher in self._watchers:
                watcher()
        return True

    def shield(self, lock: threading.Lock) -> None:
        """Have `revoke` take `lock` once before it returns."""
        with self._lock:
            self._shields.add(lock)

    def unshield(self, lock: threading.Lock) -> None:
        """Undo `shield`."""
        with self._lock:
            self._shields.discard(lock)

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` in each `revoke`, after all copies have stopped; it must not block."""
        with self._lock:
            self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[], None]) -> None:
        """Undo `watch`."""
        with self._lock:
            self._watchers.remove(watcher)

    def close(self) -> None:
        """Release the wake descriptor; the fence must not be used afterwards."""
        os.close(self.wake_fd)
