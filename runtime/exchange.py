"""Moving the bytes of one collective between neighbours, both ways at once, in one thread."""

import select
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from trainmover.runtime.fence import Fence
from trainmover.runtime.link import Link
from trainmover.runtime.shm import MIN_BYTES
from trainmover.runtime.wire import FRAME_BYTES, HEADER_BYTES, Header, Kind, Op

frame_hook: Callable[[str, int], None] | None = None
"""Fault injection: called while an all_reduce sends, with (channel, bytes sent of this frame)."""
_HOOK_BYTES = 4096  # with a hook, a frame leaves in pieces of this size
_NOTHING = memoryview(b"")
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class CollectiveMismatch(RuntimeError):
    """A peer is in another collective, or in the same with another size."""


class Call(NamedTuple):
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


Apply = Callable[[memoryview, memoryview, memoryview], None]
"""(what came, own values, out), all of one size; `out` may be what came."""


class Landing(NamedTuple):
    """What becomes of a piece that arrives."""

    size: int
    """Bytes, not 0."""
    place: memoryview | None
    """Where it is kept; None: it is only sent on."""
    onward: bool = False
    """Whether it is sent on."""
    apply: Apply | None = None
    """Makes what is kept and sent on; None: it is taken as it is."""
    own: memoryview | None = None
    """With `apply`: the own values."""


class Outgoing:
    """Pieces on their way to one peer, as frames."""

    def __init__(self, call: Call, link: Link, total: int) -> None:
        self.link = link
        self.blocked = False
        """Whether it waits for the socket."""
        self._call, self._total = call, total
        self._pieces: deque[memoryview] = deque()  # what is left of them
        self._frame_bytes = 0

    @property
    def done(self) -> bool:
        """Whether all that was put has left."""
        return not self._pieces and not self.blocked

    def put(self, piece: memoryview) -> None:
        """Have `advance` send `piece`, which is not empty and keeps its values until then."""
        self._pieces.append(piece)

    def advance(self, *, full: bool = False) -> bool:
        """Send what there is room for; True when a frame was finished. Never blocks.

        With `full` a frame may take the socket where shared memory is full.
        """
        progressed = False
        at_most = _HOOK_BYTES if self._hooked else None
        link, pieces = self.link, self._pieces
        while self.blocked or pieces:
            if self.blocked:
                gone = link.flush(self._call.generation, at_most)
            else:
                room = 0
                if at_most is None and link.shares and len(pieces[0]) >= MIN_BYTES:
                    room = link.room_shared
                    if not room and not full:
                        break
                gone = self._start(room, at_most)
                full = False
            if at_most is not None and frame_hook is not None:
                frame_hook(link.channel, self._frame_bytes - link.unsent_bytes)
            self.blocked = not gone
            if not gone:
                break
            progressed = True
        return progressed

    def compose(self, came: memoryview, own: memoryview, apply: Apply) -> bool:
        """Apply straight into the memory where the peer will read it; False: not possible now."""
        size = len(came)
        if self._pieces or self.blocked or size < MIN_BYTES or self._hooked:
            return False
        if not self.link.room_shared:
            return False
        head = self._header(size, Kind.SHARED)
        gone = self.link.compose(self._call.generation, head, lambda slot: apply(came, own, slot))
        self.blocked = not gone
        return True

    @property
    def _hooked(self) -> bool:
        return frame_hook is not None and self._call.op is Op.ALL_REDUCE

    def _start(self, room: int, at_most: int | None) -> bool:
        body, most = self._pieces.popleft(), room or FRAME_BYTES
        if len(body) > most:
            self._pieces.appendleft(body[most:])
            body = body[:most]
        self._frame_bytes = HEADER_BYTES + len(body)
        generation = self._call.generation
        if room:
            return self.link.share(generation, self._header(len(body), Kind.SHARED), body)
        return self.link.push(generation, self._header(len(body), Kind.DATA), body, at_most)

    def _header(self, size: int, kind: Kind) -> Header:
        call = self._call
        return Header(size, call.generation, call.tag, call.seq, kind, call.op, self._total)


class Incoming:
    """Pieces on their way from one peer, in the order of `landings`; none is empty.

    What is to be sent on is put to `onward`.
    """

    def __init__(
        self,
        call: Call,
        link: Link,
        landings: Iterable[Landing],
        total: int,
        onward: Outgoing | None = None,
    ) -> None:
        self.link = link
        self._call, self._total, self._onward = call, total, onward
        self._landings = iter(landings)
        self._landing = next(self._landings, None)
        self._start = 0  # of the frame in its piece
        self._frame = 0  # bytes of the frame being received, 0 between frames
        self._got = 0  # of this frame
        self._scratch = _NOTHING  # for frames from the socket that are to be combined

    @property
    def done(self) -> bool:
        """Whether all bytes have arrived."""
        return self._landing is None

    def advance(self) -> bool:
        """Take what is here, one frame of what is sent on; True when anything was. Never blocks.

        Raises CollectiveMismatch before a byte of another message is copied.
        """
        progressed = False
        while (landing := self._landing) is not None:
            if not self._frame:
                header = self.link.header(self._call.generation)
                if header is None:
                    return progressed
                self._check(header, landing)
                self._frame, self._got = header.payload, 0
            if not self._take(landing):
                return progressed
            progressed = True
            if self._got < self._frame:
                continue
            self._start += self._frame
            self._frame = 0
            if self._start == landing.size:
                self._landing, self._start = next(self._landings, None), 0
            if landing.onward:
                break
        return progressed

    def _take(self, landing: Landing) -> bool:
        """Receive of the current frame what is here; False: nothing."""
        part = slice(self._start, self._start + self._frame)
        with writing(self._call, self.link):
            payload = self.link.shared()
            if payload is not None:
                self._land(landing, part, payload)
                self.link.used()
                self._got = self._frame
                return True
        if landing.apply is None:
            assert landing.place is not None
            into = landing.place[part]
        else:
            self._scratch = self._scratch or _fresh(FRAME_BYTES)
            into = self._scratch[: self._frame]
        got = self.link.body(self._call.generation, into[self._got :])
        self._got += got
        if self._got == self._frame:
            with writing(self._call, self.link):
                self._land(landing, part, into, scratch=True)
        return got > 0

    def _land(
        self, landing: Landing, part: slice, payload: memoryview, *, scratch: bool = False
    ) -> None:
        """Make of a whole frame, `part` of its piece, what it is to be. Lock held.

        `scratch`: the payload lies in memory of ours, or in its place already.
        """
        out, place = self._onward, landing.place
        result = None if place is None else place[part]
        if landing.apply is None:
            if not scratch:
                assert result is not None
                result[:] = payload
        else:
            assert landing.own is not None
            own = landing.own[part]
            if result is None:
                assert out is not None
                if out.compose(payload, own, landing.apply):
                    return
                result = payload if scratch else _fresh(len(payload))
                self._scratch = _NOTHING
            landing.apply(payload, own, result)
        if landing.onward:
            assert out is not None
            assert result is not None
            out.put(result)

    def _check(self, header: Header, landing: Landing) -> None:
        call = self._call
        if (
            (header.kind is not Kind.DATA and header.kind is not Kind.SHARED)
            or header.op is not call.op
            or header.seq != call.seq
            or header.step != call.tag
            or header.total != self._total
            or not 0 < header.payload <= landing.size - self._start
        ):
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
        fence, generation = self._call.fence, self._call.generation
        if fence.revoked or fence.generation != generation:
            self.__exit__()
            fence.check(generation)

    def __exit__(self, *error: object) -> None:
        if self._link is not None:
            self._link.lock.release()


def transfer(call: Call, out: Outgoing | None, into: Incoming | None) -> None:
    """Send and receive at the same time, until both are done.

    Blocks until `call.deadline`; raises Revoked, LinkBroken, CollectiveMismatch, or TimeoutError
    naming the peers.
    """
    wait: _Wait | None = None
    while True:
        # sending comes first: after a mismatch the peer must get a header to find it too
        progressed = out.advance() if out else False
        progressed |= into.advance() if into else False
        if (not out or out.done) and (not into or into.done):
            return
        if not progressed and not (out and out.advance(full=True)):
            wait = wait or _Wait(call, out, into)
            wait.for_progress()


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


def _fresh(size: int) -> memoryview:
    """Memory that is not initialised."""
    array: Any = torch.empty(size, dtype=torch.uint8).numpy()
    return memoryview(array)
