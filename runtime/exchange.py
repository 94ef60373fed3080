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


Apply = Callable[[memoryview, torch.Tensor, memoryview], None]
"""(what came, own values, out), all of one size; `out` may be what came."""


class Landing(NamedTuple):
    """What becomes of a frame that arrives."""

    size: int
    """Its bytes; sender and receiver cut a piece into the same `frames`."""
    place: memoryview | None
    """Where it is kept; None: it is only sent on."""
    onward: bool = False
    """Whether it is sent on."""
    apply: Apply | None = None
    """Makes what is kept and sent on; None: it is taken as it is."""
    own: torch.Tensor | None = None
    """With `apply`: the own values."""


def frames(piece: memoryview) -> list[memoryview]:
    """The parts of `piece` that travel as a frame each; none of an empty one."""
    return [piece[i : i + FRAME_BYTES] for i in range(0, len(piece), FRAME_BYTES)]


class Outgoing:
    """Frames on their way to one peer."""

    def __init__(self, call: Call, link: Link, total: int) -> None:
        self.link = link
        self.blocked = False
        """Whether it waits for the socket."""
        self._call, self._total = call, total
        self._frames: deque[memoryview] = deque()
        self._frame_bytes = 0
        hooked = frame_hook is not None and call.op is Op.ALL_REDUCE
        self._at_most = _HOOK_BYTES if hooked else None
        self._shares = link.shares and not hooked
        self._heads: dict[tuple[int, Kind], bytes] = {}

    @property
    def done(self) -> bool:
        """Whether all that was put has left."""
        return not self._frames and not self.blocked

    def put(self, frame: memoryview) -> None:
        """Have `advance` send `frame`, which is not empty and keeps its values until then."""
        self._frames.append(frame)

    def advance(self, *, full: bool = False) -> bool:
        """Send what there is room for; True when a frame was finished. Never blocks.

        With `full` a frame may take the socket where shared memory is full.
        """
        progressed = False
        generation, link, at_most = self._call.generation, self.link, self._at_most
        while self.blocked or self._frames:
            if self.blocked:
                gone = link.flush(generation, at_most)
            else:
                size = len(self._frames[0])
                shared = self._shares and size >= MIN_BYTES and link.is_room
                if self._shares and size >= MIN_BYTES and not shared:
                    if not full:
                        break
                    full = False
                body, self._frame_bytes = self._frames.popleft(), HEADER_BYTES + size
                if shared:
                    gone = link.share(generation, self._head(size, Kind.SHARED), body)
                else:
                    gone = link.push(generation, self._head(size, Kind.DATA), body, at_most)
            if at_most is not None and frame_hook is not None:
                frame_hook(link.channel, self._frame_bytes - link.unsent_bytes)
            self.blocked = not gone
            if not gone:
                break
            progressed = True
        return progressed

    def compose(self, came: memoryview, own: torch.Tensor, apply: Apply) -> bool:
        """Apply straight into the memory where the peer will read it; False: not possible now."""
        size = len(came)
        if not self._shares or size < MIN_BYTES or not self.done or not self.link.is_room:
            return False
        head = self._head(size, Kind.SHARED)
        generation = self._call.generation
        gone = self.link.compose(generation, head, size, lambda slot: apply(came, own, slot))
        self.blocked = not gone
        return True

    def _head(self, size: int, kind: Kind) -> bytes:
        head = self._heads.get((size, kind))
        if head is None:
            call = self._call
            header = Header(size, call.generation, call.tag, call.seq, kind, call.op, self._total)
            head = self._heads[size, kind] = header.pack()
        return head


class Incoming:
    """Frames on their way from one peer, in the order of `landings`.

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
        self._got = 0  # of its frame
        self._scratch = _NOTHING  # for frames from the socket that are to be combined
        self._lent = False  # whether `onward` was given it

    @property
    def done(self) -> bool:
        """Whether all frames have arrived."""
        return self._landing is None

    def advance(self) -> bool:
        """Take what is here, one frame of what is sent on; True when one was finished.

        Never blocks; where it stops, nothing more is here. Raises CollectiveMismatch before a byte
        of another message is copied.
        """
        progressed = False
        while (landing := self._landing) is not None:
            with writing(self._call, self.link):
                if not self._take(landing):
                    break
            progressed = True
            self._landing, self._got = next(self._landings, None), 0
            if landing.onward:
                break
        return progressed

    def _take(self, landing: Landing) -> bool:
        """Receive what is here of a frame; True when it has landed. Lock held."""
        link = self.link
        header = link.header()
        if header is None:
            return False
        if not self._got:
            self._check(header, landing)
        if header.kind is Kind.SHARED:
            self._land(landing, link.shared(), ours=False)
            link.used()
            return True
        into = landing.place
        if into is None or landing.apply is not None:
            into = self._free_scratch()[: landing.size]
        self._got += link.body(into[self._got :] if self._got else into)
        if self._got < landing.size:
            return False
        self._land(landing, into, ours=True)
        return True

    def _land(self, landing: Landing, came: memoryview, *, ours: bool) -> None:
        """Make of a frame what it is to be. Lock held.

        `ours`: it lies in memory of ours, or in its place already.
        """
        out, kept = self._onward, landing.place
        if landing.apply is None:
            assert kept is not None
            if not ours:
                kept[:] = came
        else:
            assert landing.own is not None
            if kept is None:
                assert out is not None
                if out.compose(came, landing.own, landing.apply):
                    return
                kept, self._lent = (came, True) if ours else (_fresh(len(came)), self._lent)
            landing.apply(came, landing.own, kept)
        if landing.onward:
            assert out is not None
            out.put(kept)

    def _free_scratch(self) -> memoryview:
        """Memory for a frame, none of which waits to be sent on."""
        lent, self._lent = self._lent, False
        if not self._scratch or (lent and self._onward and not self._onward.done):
            self._scratch = _fresh(FRAME_BYTES)
        return self._scratch

    def _check(self, header: Header, landing: Landing) -> None:
        call = self._call
        if (
            (header.kind is not Kind.DATA and header.kind is not Kind.SHARED)
            or header.op is not call.op
            or header.seq != call.seq
            or header.step != call.tag
            or header.total != self._total
            or header.payload != landing.size
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
