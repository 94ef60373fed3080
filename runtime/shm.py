"""Payloads between neighbours on one machine: memory that both map, instead of two kernel copies.

A link has one ring of slots in each direction. The writer copies a frame's payload into the next
slot and sends the header alone over the socket; the reader adds or copies straight out of the
slot and then frees it. When no slot is free the payload travels on the socket as ever: the socket
alone makes somebody wait. The memory is anonymous (memfd), so nothing is left of it whoever dies.
"""

import mmap
import os

from trainmover.runtime.wire import FRAME_BYTES, WireError

SLOTS = 12
"""Frames on their way at most. Fewer than a rank may be ahead of its neighbour (of 5 MB over four
ranks: nine) send payloads through the kernel: four cost a third more CPU there."""
MIN_BYTES = 16 * 1024
"""A smaller payload rides with its header in one system call."""
_PAGE = mmap.PAGESIZE
_COUNT_BYTES = 8
_RING_BYTES = _PAGE + SLOTS * FRAME_BYTES
MEMORY_BYTES = 2 * _RING_BYTES
"""Of one link, both directions; pages that were never written take no memory."""


def create() -> int:
    """Descriptor of fresh memory for one link, to be passed to the peer."""
    fd = os.memfd_create("trainmover-link", os.MFD_CLOEXEC)
    os.ftruncate(fd, MEMORY_BYTES)
    return fd


class Ring:
    """One direction of one link: one writer, one reader, slots used in turn.

    The reader's count of freed slots is the only word that both touch; that it is written after
    the slot was read follows from the lock that every use of a link holds.
    """

    def __init__(self, memory: mmap.mmap, at: int) -> None:
        self._count = memoryview(memory)[at : at + _COUNT_BYTES].cast("Q")
        first = at + _PAGE
        self._slots = [
            memoryview(memory)[first + i * FRAME_BYTES : first + (i + 1) * FRAME_BYTES]
            for i in range(SLOTS)
        ]
        self._written = self._freed = 0  # the writer's `_freed` is what it knows of the reader's

    @property
    def full(self) -> bool:
        """Whether the reader has not freed any slot yet."""
        if self._written - self._freed < SLOTS:
            return False
        self._freed = self._count[0]
        return self._written - self._freed >= SLOTS

    def next(self) -> memoryview:
        """The slot to write; the ring is not `full`."""
        return self._slots[self._written % SLOTS]

    def put(self) -> None:
        """The `next` slot is written, and the reader's when it gets the header."""
        self._written += 1

    def oldest(self) -> memoryview:
        """The slot that the next header is about."""
        return self._slots[self._freed % SLOTS]

    def free(self) -> None:
        """The oldest slot was read to its end."""
        self._freed += 1
        self._count[0] = self._freed


class Memory:
    """The two rings of a link as one of its ends sees them."""

    def __init__(self, fd: int, *, dialer: bool) -> None:
        """Maps `fd` and closes it. Raises WireError for memory of another size."""
        try:
            if os.fstat(fd).st_size != MEMORY_BYTES:
                raise WireError(
                    f"expected {MEMORY_BYTES} bytes of memory for a link, got "
                    f"{os.fstat(fd).st_size}: run the same release of trainmover everywhere"
                )
            memory = mmap.mmap(fd, MEMORY_BYTES)
        finally:
            os.close(fd)
        rings = Ring(memory, 0), Ring(memory, _RING_BYTES)
        self.out, self.into = rings if dialer else rings[::-1]
