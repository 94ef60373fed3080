"""The puller's side: reads shared state from all its donors at once, straight into place.

Each donor has a thread and a connection, or two of both. What was asked of a donor that is gone is
asked of another; nothing else is read twice.
"""

import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import structlog

from trainmover.runtime.tracked import Tracked
from trainmover.runtime.transfer.chunks import Chunk
from trainmover.runtime.transfer.pulled import Pulled
from trainmover.runtime.transfer.registered import Registered, digest
from trainmover.runtime.transfer.stripes import Stripes
from trainmover.runtime.transfer.wire import Kind, TransferError, Wire
from trainmover.runtime.wire import Refused

log = structlog.get_logger()

SILENCE_S = 5.0
"""What was asked of a donor from which nothing comes for so long is asked of others, if any."""
AHEAD = 2
"""Reads under way on a connection: one is prepared there while the other comes."""
TWO_STREAMS_BYTES = 8 << 20
"""From this size on a donor has two connections: one receives while the other checks."""
HASHES_AT_ONCE = 64
CHECK_S = 0.1
"""So often it is asked whether the pull is still wanted."""
CLOSE_S = 10.0

Dial = Callable[[], socket.socket]


def pull(
    donors: Mapping[str, Dial],
    tracked: Tracked,
    *,
    deadline_s: float,
    silence_s: float = SILENCE_S,
    objects: tuple[str, ...] = (),
    check: Callable[[], None] = lambda: None,
) -> Pulled:
    """Fills `tracked`, or those `objects` of it, with what all `donors` hold; blocks.

    A donor (worker -> what opens a connection to it) that dies or falls silent is left out as long
    as another is there. Whether the result is right: compare its digests. `check` is called now
    and then, and what it raises ends the pull.

    Raises TransferError when donors differ or none is left, the error of an only donor (OSError,
    TransferError, Refused), TimeoutError, or ValueError where this rank is built otherwise than
    its donors; after any of them the state here is partly overwritten.
    """
    started = time.monotonic()
    under_way = _Pull(donors, objects, deadline_s, silence_s, check)
    try:
        text = under_way.structure()
        places = Registered(text, tracked.receive(text, objects))
        under_way.read(places)
        tracked.received()
        here = tracked.register(objects)
        here.adopt(places)
        found = here.digest()
        donor_digest = under_way.digest()
    finally:
        under_way.close()
    return Pulled(
        donors={worker: under_way.came[worker] for worker in donors},
        again=under_way.again,
        seconds=time.monotonic() - started,
        donor_digest=donor_digest,
        digest=found,
    )


class _Over(Exception):
    """The pull has ended, or its donor was left out: the stream stops."""


class _Pull:
    """What the streams share, under one lock. The thread that pulls calls the methods in order."""

    def __init__(
        self,
        donors: Mapping[str, Dial],
        objects: tuple[str, ...],
        deadline_s: float,
        silence_s: float,
        check: Callable[[], None],
    ) -> None:
        self._donors, self._objects, self._check = dict(donors), objects, check
        self._deadline_s, self._silence_s = deadline_s, silence_s
        self._end = time.monotonic() + deadline_s
        self._cond = threading.Condition()
        self._left: dict[str, Exception] = {}
        self._error: BaseException | None = None
        self._over = False
        self._sockets: dict[socket.socket, str] = {}
        self._structures: dict[str, str] = {}
        self._asked: str | None = None
        """Whose structure is on its way, or there."""
        self._text: bytes | None = None
        self._places: Registered | None = None
        self._stripes = Stripes(())
        self._digests: dict[str, str] = {}
        self.came: Counter[str] = Counter()
        for donor in donors:
            self._start(donor, first=True)

    # ---- the thread that pulls

    def structure(self) -> bytes:
        """From the first donor that gives it."""
        self._wait(lambda: self._text is not None)
        assert self._text is not None
        return self._text

    def read(self, places: Registered) -> None:
        """Every byte is in place when this returns."""
        with self._cond:
            self._stripes = Stripes(places.chunks)
            self._places = places
            self._cond.notify_all()
            large = places.nbytes >= TWO_STREAMS_BYTES
            for donor in self._alive if large else ():
                self._start(donor, first=False)
        self._wait(lambda: self._stripes.done)

    def digest(self) -> str:
        """That of all donors that are still there, which must be the same."""
        self._wait(lambda: all(donor in self._digests for donor in self._alive))
        with self._cond:
            if message := _differing(self._digests):
                raise TransferError(message)
            return next(iter(self._digests.values()))

    @property
    def again(self) -> int:
        return self._stripes.again

    def close(self) -> None:
        """No stream writes anything any more when this returns."""
        with self._cond:
            self._over = True
            self._shut(list(self._sockets))
            self._cond.notify_all()
            self._cond.wait_for(lambda: not self._sockets, CLOSE_S)

    def _wait(self, done: Callable[[], bool]) -> None:
        with self._cond:
            while not done():
                if self._error is not None:
                    raise self._error
                self._check()
                left = self._end - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"state: not done within {self._deadline_s} s")
                self._cond.wait(min(left, CHECK_S))
            if self._error is not None:
                raise self._error

    # ---- the donors; lock held

    @property
    def _alive(self) -> list[str]:
        return [donor for donor in self._donors if donor not in self._left]

    def _leave(self, donor: str, error: Exception) -> None:
        if self._over or donor in self._left:
            return
        self._left[donor] = error
        if self._asked == donor and self._text is None:
            self._asked = None
        self._shut([sock for sock, its in self._sockets.items() if its == donor])
        if self._alive:
            log.warning("pull.donor_left", donor=donor, error=str(error))
        elif len(self._left) == 1:
            self._error = error
        else:
            reasons = "; ".join(f"{worker}: {why}" for worker, why in self._left.items())
            self._error = TransferError(f"no donor is left: {reasons}")
        self._cond.notify_all()

    def _shut(self, sockets: list[socket.socket]) -> None:
        for sock in sockets:
            with suppress(OSError):  # the donor was faster
                sock.shutdown(socket.SHUT_RDWR)

    # ---- a stream, in its thread

    def _start(self, donor: str, *, first: bool) -> None:
        name = f"pull {donor}"
        threading.Thread(target=self._run, args=(donor, first), name=name, daemon=True).start()

    def _run(self, donor: str, first: bool) -> None:
        try:
            with self._connected(donor) as wire:
                self._stream(donor, wire, first)
        except _Over:
            pass
        except (TransferError, OSError, Refused) as error:
            with self._cond:
                self._leave(donor, error)
        except BaseException as error:
            with self._cond:
                self._error = error
                self._cond.notify_all()

    def _stream(self, donor: str, wire: Wire, first: bool) -> None:
        wire.ask(Kind.OPEN, more="\n".join(self._objects).encode())
        self._agree(donor, wire.body(Kind.OPEN, "OPEN").decode("ascii", "replace"))
        places = self._await_places(donor, wire)
        # Each donor must hash what the others give: they do it while the state is on its way.
        meanwhile = first and len(self._donors) > 1 and places.nbytes >= TWO_STREAMS_BYTES
        if meanwhile:
            self._hash(donor, wire, places)
        self._read(donor, wire, places)
        if first and not meanwhile:
            self._hash(donor, wire, places)

    @contextmanager
    def _connected(self, donor: str) -> Iterator[Wire]:
        sock = self._donors[donor]()
        with sock:
            with self._cond:
                self._stop_if_over(donor)
                self._sockets[sock] = donor
            try:
                yield Wire(
                    sock,
                    self._deadline_s,
                    end=self._end,
                    silence_s=self._silence_s,
                    silent=lambda what: self._silent(donor, what),
                )
            finally:
                with self._cond:
                    del self._sockets[sock]
                    self._cond.notify_all()

    def _silent(self, donor: str, what: str) -> None:
        """The last donor is waited for."""
        with self._cond:
            if donor in self._left or len(self._alive) > 1:
                error = TimeoutError(f"nothing came for {self._silence_s} s ({what})")
                self._leave(donor, error)
                raise error

    def _agree(self, donor: str, structure: str) -> None:
        """Where structures differ, once all have said theirs, that ends the pull."""
        with self._cond:
            self._structures[donor] = structure
            self._cond.notify_all()
            if _differing(self._structures):
                self._cond.wait_for(
                    lambda: self._over or self._structures.keys() >= set(self._alive)
                )
                self._error = TransferError(_differing(self._structures))
                self._cond.notify_all()
                raise _Over

    def _await_places(self, donor: str, wire: Wire) -> Registered:
        """Blocks until the pulling thread has made them; gives it a structure if none does."""
        with self._cond:
            while self._places is None:
                self._stop_if_over(donor)
                if self._asked is None:
                    self._asked = donor
                    break
                self._cond.wait()
            else:
                return self._places
        wire.ask(Kind.STRUCTURE)
        text = wire.body(Kind.STRUCTURE, "STRUCTURE")
        with self._cond:
            self._text = text
            self.came[donor] += len(text)
            self._cond.notify_all()
        return self._await_places(donor, wire)

    def _read(self, donor: str, wire: Wire, places: Registered) -> None:
        asked: deque[Chunk] = deque()
        try:
            while True:
                while len(asked) < AHEAD and (chunk := self._take(donor, wire, wait=not asked)):
                    asked.append(chunk)
                    wire.ask(Kind.READ, chunk)
                if not asked:
                    return
                chunk = asked[0]
                windows = places.windows(chunk)
                what = f"{chunk.length} bytes at {chunk.offset} of tensor {chunk.tensor}"
                value = wire.read_into([window.memory for window in windows], what)
                for window in windows:
                    window.written()
                places.learn(chunk, value)
                asked.popleft()
                with self._cond:
                    self._stripes.came(wire, chunk)
                    self.came[donor] += chunk.length
                    if self._stripes.done:
                        self._cond.notify_all()
        finally:
            with self._cond:
                self._stripes.lost(wire)
                self._cond.notify_all()

    def _take(self, donor: str, wire: Wire, *, wait: bool) -> Chunk | None:
        """None when there is nothing left to ask for (now, or with `wait` at all)."""
        with self._cond:
            while True:
                self._stop_if_over(donor)
                chunk = self._stripes.take(wire)
                if chunk or not wait or self._stripes.done:
                    return chunk
                self._cond.wait()

    def _hash(self, donor: str, wire: Wire, places: Registered) -> None:
        """The digest of what the donor holds, from its checksums."""
        values: list[int] = []
        for at in range(0, len(places.chunks), HASHES_AT_ONCE):
            values += wire.hashes(places.chunks[at : at + HASHES_AT_ONCE])
        with self._cond:
            self._digests[donor] = digest(places.structure, values)
            self._cond.notify_all()

    def _stop_if_over(self, donor: str) -> None:
        if self._over or donor in self._left:
            raise _Over


def _differing(found: Mapping[str, str]) -> str:
    """Names who holds another state than most; empty where all hold the same."""
    counts = Counter(found.values()).most_common()
    if len(counts) <= 1:
        return ""
    usual = counts[0][0]
    odd = ", ".join(f"{worker} (xxh3 {d})" for worker, d in sorted(found.items()) if d != usual)
    same = ", ".join(worker for worker, d in sorted(found.items()) if d == usual)
    return f"donors differ: {odd} holds other state than {same} (xxh3 {usual})"
