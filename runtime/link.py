"""One connection between two ranks in one channel, fenced by generation.

Nothing here blocks in a system call: reads and writes are non-blocking and hold the link's lock,
so that `Fence.revoke` knows when the last byte of a generation was copied (design/groups.md).
"""

import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from trainmover.runtime.fence import Fence
from trainmover.runtime.shm import Memory
from trainmover.runtime.wire import (
    HEADER_BYTES,
    Header,
    Kind,
    Op,
    WireError,
    message_frames,
    unpack_header,
)

_READ_BYTES = 8192  # small messages come with their header in one system call
_MESSAGES_BYTES = 16 * 1024  # a rank's extras of one step and its vote come in one system call
_DRAIN_BYTES = 64 * 1024
_NOTHING = memoryview(b"")

_sockets: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def close_in_children(sock: socket.socket) -> None:
    """Close `sock` in every forked child: a DataLoader worker that holds it delays an EOF."""
    _sockets.add(sock)


def _close_inherited() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_close_inherited)


class LinkBroken(Exception):
    """A connection ended, or broke the protocol, within its generation."""

    def __init__(self, peer_rank: int, peer_worker: str, channel: str, cause: str) -> None:
        super().__init__(
            f"the link to rank {peer_rank} ({peer_worker}) in channel {channel} broke: {cause}"
        )
        self.peer_rank = peer_rank
        self.peer_worker = peer_worker
        self.channel = channel
        self.cause = cause


class Link:
    """Full-duplex framed stream to one peer; one thread may send while another receives.

    Every method that takes a `generation` raises `Revoked` once that generation has ended and
    LinkBroken when the connection did, and never blocks.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer_rank: int,
        peer_worker: str,
        channel: str,
        generation: int,
        fence: Fence,
        memory: Memory | None = None,
    ) -> None:
        """`memory`: shared with a peer on this machine, for payloads of DATA frames."""
        sock.setblocking(False)
        close_in_children(sock)
        self.sock = sock
        self.peer_rank = peer_rank
        self.peer_worker = peer_worker
        self.channel = channel
        self.generation = generation
        self.lock = threading.Lock()
        self.fault: str | None = None
        """Why the connection is of no use any more."""
        self._fence, self._memory = fence, memory
        self.shares = memory is not None
        """Whether payloads can lie in shared memory."""
        self._head, self._body = b"", _NOTHING  # what is left of the frame being sent
        self._queue: deque[tuple[bytes, bytes]] = deque()
        self._buffer = bytearray(_READ_BYTES)  # received and not yet looked at: [_low, _high)
        self._low = self._high = 0
        self._frame: Header | None = None
        self._left = 0  # bytes of the frame being received that are still to come
        self._message = bytearray()
        self._marked_generation = -1
        fence.shield(self.lock)

    def fileno(self) -> int:
        """The descriptor to poll; -1 once closed."""
        return self.sock.fileno()

    def identity(self) -> int:
        """Inode of the socket: the same number means the same connection."""
        return os.fstat(self.sock.fileno()).st_ino

    def close(self) -> None:
        """Close the connection; the peer sees an EOF."""
        with self.lock:
            self.fault = self.fault or "closed on this side"
            self.sock.close()
        self._fence.unshield(self.lock)

    def shutdown(self) -> None:
        """Cut the connection as a broken cable does: both ends find an EOF."""
        with self.lock, suppress(OSError):  # it may be gone already
            self.sock.shutdown(socket.SHUT_RDWR)

    # Sending

    def push(
        self, generation: int, head: bytes, body: memoryview, at_most: int | None = None
    ) -> bool:
        """Start to send one frame; True when all of it is gone. The one before must be.

        `head`: its packed header.
        """
        with self.lock:
            self._fence.check(generation)
            self._head, self._body = head, body
            return self._flush(at_most)

    def share(self, generation: int, head: bytes, body: memoryview) -> bool:
        """`push` with the payload in shared memory, where there `is_room`."""
        with self.lock:
            self._fence.check(generation)
            assert self._memory is not None
            self._memory.out.next()[: len(body)] = body
            return self._put(head)

    def compose(
        self, generation: int, head: bytes, size: int, write: Callable[[memoryview], None]
    ) -> bool:
        """`share` of a payload that `write` makes in its slot, with the lock held."""
        with self.lock:
            self._fence.check(generation)
            assert self._memory is not None
            write(self._memory.out.next()[:size])
            return self._put(head)

    def _put(self, head: bytes) -> bool:
        assert self._memory is not None
        self._memory.out.put()
        self._head, self._body = head, _NOTHING
        return self._flush(None)

    @property
    def is_room(self) -> bool:
        """Whether the next payload can lie in shared memory now."""
        return self._memory is not None and not self._memory.out.full

    def flush(self, generation: int, at_most: int | None = None) -> bool:
        """Go on sending, `at_most` so many bytes; True when nothing is left to send."""
        with self.lock:
            self._fence.check(generation)
            return self._flush(at_most)

    def send(self, generation: int, kind: Kind, step: int, payload: bytes) -> bool:
        """`queue` and `flush` a control message; True when nothing is left to send."""
        with self.lock:
            self._fence.check(generation)
            frames = message_frames(kind, self.generation, step, payload)
            if self._head or self._body or self._queue or len(frames) > 1:
                self._queue.extend(frames)
            else:
                head, body = frames[0]
                self._head, self._body = head, memoryview(body)
            return self._flush(None)

    def queue(self, kind: Kind, step: int, payload: bytes, seq: int = 0) -> None:
        """Append a control message to what `flush` sends; a renewal drops what is left."""
        with self.lock:
            self._queue.extend(message_frames(kind, self.generation, step, payload, seq))

    @property
    def has_unread(self) -> bool:
        """Whether bytes were received that no poll tells of, as behind a peer's marker."""
        return self._high > self._low

    @property
    def unsent_bytes(self) -> int:
        """What `flush` has still to send."""
        queued = sum(len(head) + len(body) for head, body in self._queue)
        return len(self._head) + len(self._body) + queued

    def _flush(self, at_most: int | None) -> bool:
        while True:
            if not self._head and not self._body:
                if not self._queue:
                    return True
                head, body = self._queue.popleft()
                self._head, self._body = head, memoryview(body)
            try:
                if at_most is None:
                    sent = self._open_socket().sendmsg((self._head, self._body))
                else:
                    sent = self._open_socket().send((self._head or self._body)[:at_most])
            except BlockingIOError:
                return False
            except OSError as error:
                raise self.broken(f"sending failed: {error}") from error
            if sent == len(self._head) + len(self._body) and at_most is None and not self._queue:
                self._head, self._body = b"", _NOTHING
                return True
            in_head = min(sent, len(self._head))
            self._head, self._body = self._head[in_head:], self._body[sent - in_head :]
            if at_most is not None:
                return not self.unsent_bytes

    # Receiving: whoever calls the next four holds the lock, and has checked the fence under it

    def header(self) -> Header | None:
        """Header of the frame that comes next, or is being received; None while it is not here.

        Frames of older generations are dropped on the way; one of a newer generation waits.
        """
        while True:
            if self._frame is None and not self._fill_header():
                return None
            assert self._frame is not None
            if self._frame.generation == self.generation:
                return self._frame
            if self._frame.generation > self.generation or not self._drain():
                return None

    def body(self, view: memoryview) -> int:
        """Copy into `view` what is here of the current frame; returns the bytes copied.

        Fewer than were to come: no more is here. Call it once for an empty frame too. Not for one
        in shared memory.
        """
        want = min(len(view), self._left)
        got = min(want, self._high - self._low)
        if got:
            view[:got] = memoryview(self._buffer)[self._low : self._low + got]
            self._low += got
        if got < want == self._left:  # nothing is buffered: the next header may come along
            came = self._receive(view[got:want], memoryview(self._buffer)[:HEADER_BYTES])
            self._low, self._high = 0, max(0, came - want + got)
            got = min(want, got + came)
        elif got < want:
            got += self._receive(view[got:want])
        self._left -= got
        if not self._left:
            self._frame = None
        return got

    def shared(self) -> memoryview:
        """The whole payload of the current frame, whose kind is SHARED."""
        assert self._frame is not None
        assert self._memory is not None
        return self._memory.into.oldest()[: self._frame.payload]

    def used(self) -> None:
        """`shared` was read to its end: the current frame is over."""
        assert self._memory is not None
        self._memory.into.free()
        self._left, self._frame = 0, None

    def messages(self, generation: int) -> list[tuple[Header, bytes]]:
        """The complete control messages that are here, in order; reads once if all came whole."""
        complete: list[tuple[Header, bytes]] = []
        with self.lock:
            self._fence.check(generation)
            if len(self._buffer) < _MESSAGES_BYTES:
                self._buffer.extend(bytes(_MESSAGES_BYTES - len(self._buffer)))
            while not complete or self._high - self._low >= HEADER_BYTES:
                header = self.header()
                if header is None:
                    break
                end = self._low + self._left
                if end <= self._high and header.payload == header.total:  # nearly always
                    complete.append((header, bytes(memoryview(self._buffer)[self._low : end])))
                    self._low, self._left, self._frame = end, 0, None
                    continue
                piece = bytearray(self._left)
                got = self.body(memoryview(piece))
                self._message += memoryview(piece)[:got]
                if self._frame is not None:
                    break
                if len(self._message) >= header.total:
                    complete.append((header, bytes(self._message)))
                    self._message.clear()
        return complete

    @property
    def holds_newer(self) -> bool:
        """Whether a frame of a newer generation waits, so that polling for input is no use."""
        return self._frame is not None and self._frame.generation > self.generation

    def _fill_header(self) -> bool:
        while self._high - self._low < HEADER_BYTES:
            if self._low:
                rest = self._buffer[self._low : self._high]
                self._buffer[: len(rest)] = rest
                self._low, self._high = 0, len(rest)
            got = self._receive(memoryview(self._buffer)[self._high :])
            if not got:
                return False
            self._high += got
        try:
            self._frame = unpack_header(self._buffer, self._low)
        except WireError as error:
            raise self.broken(str(error)) from error
        if self._frame.kind is Kind.SHARED and self._memory is None:
            raise self.broken("a payload in shared memory, where there is none")
        self._low += HEADER_BYTES
        self._left = self._frame.payload
        return True

    def _drain(self) -> bool:
        assert self._frame is not None
        if self._frame.kind is Kind.SHARED:
            self.used()
            return True
        scratch = memoryview(bytearray(min(self._left, _DRAIN_BYTES)))
        while self._left:
            if not self.body(scratch):
                return False
        self._frame = None
        return True

    def _receive(self, *views: memoryview) -> int:
        try:
            got = self._open_socket().recvmsg_into(views)[0]
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self.broken(f"receiving failed: {error}") from error
        if not got:
            raise self.broken("the peer closed the connection")
        return got

    # From one generation to the next

    def renew(self, generation: int, marker: bool) -> None:
        """Move a link that both ends keep to `generation`; with `marker`, tell the peer.

        What was half sent is completed with zeros and what was half received will be drained.
        Only between `Fence.revoke` and `Fence.open`, when every member has ended the old
        generation: else a peer would take the zeros for data.
        """
        with self.lock:
            self._body = memoryview(bytes(len(self._body)))
            self._queue.clear()
            self._message.clear()
            self.generation = generation
            if marker:
                head = Header(0, generation, 0, 0, Kind.MARKER, Op.NONE, 0).pack()
                self._queue.append((head, b""))

    def renewed(self) -> bool:
        """Flush, and drop input up to the peer's marker; True when both are done.

        Raises LinkBroken; never blocks. Not to be called again once it was True.
        """
        with self.lock:
            sent = self._flush(None)
            if self._marked_generation != self.generation:
                header = self.header()
                if header is None:
                    return False
                if header.kind is not Kind.MARKER:
                    raise self.broken(f"expected a marker, got {header.kind.name}")
                self.body(_NOTHING)
                self._marked_generation = self.generation
            return sent

    def _open_socket(self) -> socket.socket:
        if self.fault is not None:
            raise self.broken(self.fault)
        return self.sock

    def broken(self, cause: str) -> LinkBroken:
        """Mark the connection as of no use and return the error to raise."""
        self.fault = cause
        return LinkBroken(self.peer_rank, self.peer_worker, self.channel, cause)
