"""The one switch that ends a generation for every link of the process, and what keeps a worker
from working towards one that a newer plan has overtaken."""

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress


class Revoked(Exception):
    """The generation of this operation has ended; nothing of it may be sent or written."""


class Cancellation:
    """Cuts short what the training thread does towards a generation: `cancel` from any thread."""

    def __init__(self) -> None:
        self._below, self._cause = 0, ""
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()

    def cancel(self, below: int, cause: str) -> None:
        """No generation lower than `below` is reached here any more. Never blocks."""
        with self._lock:
            if below > self._below:
                self._below, self._cause = below, cause
                os.eventfd_write(self._wake_fd, 1)

    def check(self, generation: int) -> None:
        """Raise `Revoked` when `generation` was cancelled. Never blocks."""
        if generation < self._below:
            raise Revoked(f"generation {generation} is given up: {self._cause}")

    def poll(self, generation: int, poller: select.poll, timeout_s: float) -> list[tuple[int, int]]:
        """`poller.poll`, for one wait towards `generation`; raises `Revoked` when it is cancelled.

        Only the training thread may wait: of two waiters one could miss the cancellation.
        """
        poller.register(self._wake_fd, select.POLLIN)
        ready = poller.poll(timeout_s * 1000)
        with suppress(BlockingIOError):  # what it says counts, and may be of an earlier wait
            os.eventfd_read(self._wake_fd)
        self.check(generation)
        return ready

    def close(self) -> None:
        """Release the descriptor; it must not be used afterwards."""
        os.close(self._wake_fd)


class Fence:
    """Says which generation may communicate, and ends it at once.

    Starts revoked at generation 0: nothing moves before the first `open`. Whoever copies received
    bytes into memory of the user holds a lock registered with `shield` and calls `check` under
    it; `revoke` takes each of them once, so when it returns no such copy is under way. Thread safe.
    """

    def __init__(self, cancellation: Cancellation | None = None) -> None:
        """`cancellation`: of what leads to the next generation; fences that share one do not close
        it."""
        self.cancellation = cancellation or Cancellation()
        self._shares = cancellation is not None
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

        Raises ValueError for a generation that is older, or was revoked before, and `Revoked` for
        one that was cancelled.
        """
        with self._lock:
            self.cancellation.check(generation)
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

    def end(self, below: int, cause: str) -> None:
        """Revoke what runs, if it is lower than `below`; blocks as `revoke` does."""
        with self._lock:
            if self.generation < below:
                self.revoke(self.generation, cause)

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
        """Release the descriptors; the fence must not be used afterwards."""
        os.close(self.wake_fd)
        if not self._shares:
            self.cancellation.close()
