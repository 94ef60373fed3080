"""Moving the bytes of one collective between neighbours, both ways at once, in one thread."""

import select
import time
from collections.abc import Callable
from dataclasses import dataclass

from trainmover.runtime.fence import Fence
from trainmover.runtime.link import Link
from trainmover.runtime.shm import MIN_BYTES
from trainmover.runtime.wire import FRAME_BYTES, HEADER_BYTES, Header, Kind, Op

frame_hook: Callable[[str, int], None] | None = None
"""Fault injection: called while an all_reduce sends, with (channel, bytes sent of this frame)."""
_HOOK_BYTES = 4096  # with a hook, a frame leaves in pieces of this size
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class CollectiveMismatch(RuntimeError):
    """A peer is in another collective, or in the same with another size."""


@dataclass(frozen=True)
class Call:
    """One collective of one group in one generation."""

    fence: Fence
    generation: int
    group: str
    op: Op
    seq: int
    deadline: float
    """By time.monotonic()."""
    timeout_s: float
    tag: int = 0


class Outgoing:
    """The bytes of `view` on their way to one peer, as frames."""

    def __init__(self, call: Call, link: Link, view: memoryview, total: int) -> None:
        self.link = link
        self.limit = len(view)
        """Bytes that may leave so far; a forwarder raises it as they arrive."""
        self.blocked = False
        """Whether it waits for the socket."""
        self._call, self._view, self._total = call, view, total
        self._sent = 0  # bytes of the frames started
        self._frame_bytes = 0

    @property
    def done(self) -> bool:
        """Whether all bytes are with the kernel."""
        return self._sent == len(self._view) and not self.blocked

    def advance(self) -> bool:
        """Send what the socket takes; True when a frame was finished. Never blocks."""
        progressed = False
        piece = _HOOK_BYTES if frame_hook is not None and self._call.op is Op.ALL_REDUCE else None
        while True:
            if self.blocked:
                gone = self.link.flush(self._call.generation, piece)
            else:
                room = 0 if piece else self.link.room_shared
                size = min(room or FRAME_BYTES, self.limit - self._sent)
                if size <= 0 or (size < FRAME_BYTES and self.limit < len(self._view)):
                    return progressed
                gone = self._start(size, piece, shared=room > 0 and size >= MIN_BYTES)
            if piece is not None and frame_hook is not None:
                frame_hook(self.link.channel, self._frame_bytes - self.link.unsent_bytes)
            self.blocked = not gone
            if not gone:
                return progressed
            progressed = True

    def _start(self, size: int, piece: int | None, *, shared: bool) -> bool:
        call = self._call
        kind = Kind.SHARED if shared else Kind.DATA
        head = Header(size, call.generation, call.tag, call.seq, kind, call.op, self._total)
        body = self._view[self._sent : self._sent + size]
        self._sent += size
        self._frame_bytes = HEADER_BYTES + size
        if shared:
            return self.link.share(call.generation, head, body)
        return self.link.push(call.generation, head, body, piece)


class Incoming:
    """`size` bytes on their way from one peer.

    Without `apply` they go straight into `target`. With it, `apply(offset, payload)` is called
    under the link's lock for each frame that is complete; `target` holds one from the socket.
    """

    def __init__(
        self,
        call: Call,
        link: Link,
        target: memoryview,
        size: int,
        total: int,
        apply: Callable[[int, memoryview], None] | None = None,
    ) -> None:
        self.link = link
        self.complete = 0
        """Bytes of complete frames."""
        self._call, self._target, self._apply = call, target, apply
        self._size, self._total = size, total
        self._frame = 0  # bytes of the frame being received, 0 between frames
        self._got = 0  # of this frame

    @property
    def done(self) -> bool:
        """Whether all bytes have arrived."""
        return self.complete == self._size

    def advance(self) -> bool:
        """Take what is here; True when anything was. Never blocks.

        Raises CollectiveMismatch before a byte of another message is copied.
        """
        progressed = False
        generation = self._call.generation
        while not self.done:
            if not self._frame:
                header = self.link.header(generation)
                if header is None:
                    return progressed
                self._check(header)
                self._frame, self._got = header.payload, 0
                if self._applied_in_place():
                    progressed = True
                    continue
            start = (0 if self._apply else self.complete) + self._got
            got = self.link.body(generation, self._target[start : start + self._frame - self._got])
            if not got:
                return progressed
            progressed = True
            self._got += got
            if self._got == self._frame:
                if self._apply is not None:
                    with writing(self._call, self.link):
                        self._apply(self.complete, self._target[: self._frame])
                self.complete += self._frame
                self._frame = 0
        return progressed

    def _applied_in_place(self) -> bool:
        """Where the payload lies in shared memory: add it from there, without a copy."""
        if self._apply is None:
            return False
        with writing(self._call, self.link):
            payload = self.link.shared()
            if payload is None:
                return False
            self._apply(self.complete, payload)
            self.link.used()
        self.complete += self._frame
        self._frame = 0
        return True

    def _check(self, header: Header) -> None:
        call = self._call
        expected = (call.op, call.seq, call.tag, self._total)
        came = (header.op, header.seq, header.step, header.total)
        fits = 0 < header.payload <= self._size - self.complete
        if came != expected or not fits or header.kind not in (Kind.DATA, Kind.SHARED):
            raise CollectiveMismatch(
                f"group {call.group}: expected {call.op.name} number {call.seq} (tag {call.tag}) "
                f"of {self._total} bytes, but rank {self.link.peer_rank} is in {header.op.name} "
                f"number {header.seq} (tag {header.step}) of {header.total} bytes: every member "
                "must issue the same collectives, of the same sizes, in the same order"
            )


class writing:
    """Holds the lock under which memory of the user may be written; raises Revoked.

    A group of one has no link; its collectives run in the thread that issues them. A class, since
    it is entered for every frame and a generator costs four times as much.
    """

    def __init__(self, call: Call, link: Link | None) -> None:
        self._call, self._link = call, link

    def __enter__(self) -> None:
        if self._link is not None:
            self._link.lock.acquire()
        try:
            self._call.fence.check(self._call.generation)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        if self._link is not None:
            self._link.lock.release()


def transfer(
    call: Call, out: Outgoing | None, into: Incoming | None, forward: bool = False
) -> None:
    """Send and receive at the same time, until both are done.

    With `forward`, `out` sends what `into` has received. Blocks until `call.deadline`; raises
    Revoked, LinkBroken, CollectiveMismatch, or TimeoutError naming the peers.
    """
    wait: _Wait | None = None
    while True:
        # sending comes first: after a mismatch the peer must get a header to find it too
        if out and into and forward:
            out.limit = into.complete
        progressed = out.advance() if out else False
        progressed |= into.advance() if into else False
        if (not out or out.done) and (not into or into.done):
            return
        if not progressed:
            wait = wait or _Wait(call, out, into)
            wait.for_progress()


def exchange(
    call: Call,
    to: Link | None,
    sent: memoryview,
    source: Link | None,
    received: memoryview,
    total: int,
) -> None:
    """One `transfer` of whole pieces; an empty piece is not sent at all."""
    out = Outgoing(call, to, sent, total) if to and len(sent) else None
    into = None
    if source and len(received):
        into = Incoming(call, source, received, len(received), total)
    transfer(call, out, into)


class _Wait:
    """What one transfer waits for, again and again: a poller is made anew only for other events."""

    def __init__(self, call: Call, out: Outgoing | None, into: Incoming | None) -> None:
        self._call, self._out, self._into = call, out, into
        self._events: dict[Link, int] = {}
        self._poller = select.poll()

    def for_progress(self) -> None:
        """Block until a link can go on. Raises as `transfer` does."""
        call, out, into = self._call, self._out, self._into
        left_s = call.deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(self._reason())
        # a dead neighbour is noticed on the sending side too, where nothing is ever read
        events: dict[Link, int] = {}
        if out:
            events[out.link] = select.POLLRDHUP | (select.POLLOUT if out.blocked else 0)
        if into and not into.done:
            reading = 0 if into.link.holds_newer else select.POLLIN
            events[into.link] = events.get(into.link, 0) & select.POLLOUT | reading
        if events != self._events:
            self._watch(events)
        ready = dict(self._poller.poll(left_s * 1000))
        call.fence.check(call.generation)
        shared = out and into and not into.done and out.link is into.link  # reading will find out
        if out and not shared and ready.get(out.link.fileno(), 0) & _GONE:
            raise out.link.broken("the peer closed the connection")

    def _watch(self, events: dict[Link, int]) -> None:
        self._events, self._poller = events, select.poll()
        self._poller.register(self._call.fence.wake_fd, select.POLLIN)
        for link, mask in events.items():
            self._poller.register(link, mask)

    def _reason(self) -> str:
        call = self._call
        ends = [end for end in (self._out, self._into) if end is not None and not end.done]
        names = ", ".join(f"rank {e.link.peer_rank} ({e.link.peer_worker})" for e in ends)
        return (
            f"group {call.group}: expected {call.op.name} number {call.seq} within "
            f"{call.timeout_s} s, still waiting for {names}: check what they are doing"
        )
