"""The conversation of a transfer on a connected socket: requests, and an answer to each in order.

Request: magic, kind, tensor, offset, length; for OPEN and HASHES `length` bytes follow. Answer:
magic, kind, length of a body, the body, its xxh3_64. The body of a READ is the bytes themselves;
both sides hash it while it passes, piece by piece, as long as the processor's cache has it.
"""

import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

import xxhash

from trainmover.runtime.transfer.chunks import Chunk

MAX_BODY = 1 << 30  # bytes; structure of 10 million tensors, far more than any extras
MAX_ASKED = 1 << 20  # bytes behind a request
HOT = 512 << 10  # bytes that are still in the cache when what was done with them last is over
TICK_S = 1.0
"""No system call waits longer; after it deadline and silence are looked at."""
_MAGIC = b"TMv2"
_REQUEST = struct.Struct("!4sBIQI")
_ANSWER = struct.Struct("!4sBQ")
_DESCRIPTOR = struct.Struct("!IQI")
_TIMEVAL = struct.Struct("@ll")
_HASH = struct.Struct("!Q")


class Kind(IntEnum):
    """What is asked for."""

    REFUSED = 0
    """Only answered; the body says why."""
    OPEN = 1
    """Which tracked objects this connection is about (names, a line each; none: all). The answer
    is the digest of their structure."""
    STRUCTURE = 2
    READ = 3
    HASHES = 4
    """Checksums of chunks."""
    EXTRAS = 5


class TransferError(Exception):
    """The other side broke the protocol, or the bytes did not survive the way; pull again."""


class Request(NamedTuple):
    kind: Kind
    chunk: Chunk
    asked: bytes
    """What follows it."""


class Wire:
    """One side of it. Every method blocks, until `deadline_s` seconds after the construction (or
    until `end`, monotonic) at most; then TimeoutError. TransferError for what is no answer, OSError
    from the socket.

    `silent` is asked each time nothing came for `silence_s` seconds, and may raise.
    """

    def __init__(
        self,
        sock: socket.socket,
        deadline_s: float,
        *,
        end: float | None = None,
        silence_s: float | None = None,
        silent: Callable[[str], None] = lambda what: None,
    ) -> None:
        self._sock = sock
        self._deadline_s = deadline_s
        self._end = time.monotonic() + deadline_s if end is None else end
        self._silence_s, self._silent = silence_s or deadline_s, silent
        # The kernel waits: one call then moves a whole chunk, where Python's timeout takes several.
        sock.settimeout(None)
        tick_s = min(TICK_S, self._silence_s, deadline_s)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*_timeval(tick_s)))

    # ---- who asks

    def ask(self, kind: Kind, chunk: Chunk | None = None, more: bytes = b"") -> None:
        """`receive` is next; several may be under way."""
        tensor, offset, length = chunk or Chunk(0, 0, len(more))
        self._send([memoryview(_REQUEST.pack(_MAGIC, kind, tensor, offset, length) + more)])

    def body(self, kind: Kind, what: str) -> bytes:
        """A whole answer."""
        return self._body(self._header(kind, what), what)

    def _header(self, kind: Kind, what: str) -> int:
        """Length of the body of an answer of that kind."""
        header = self._receive(_ANSWER.size, f"an answer ({what})")
        magic, answered, length = _ANSWER.unpack(header)
        if (magic, answered) == (_MAGIC, Kind.REFUSED):
            reason = self._body(length, "a refusal").decode("utf-8", "replace")
            raise TransferError(f"{what} was refused: {reason[:1000]}")
        if (magic, answered) != (_MAGIC, kind):
            raise TransferError(
                f"expected {kind.name} ({_MAGIC!r}, {kind:d}), got {magic!r}, {answered}"
            )
        return int(length)

    def read_into(self, parts: Sequence[memoryview], what: str) -> int:
        """The bytes of one READ; returns their checksum, which has been compared."""
        expected = sum(map(len, parts))
        length = self._header(Kind.READ, what)
        if length != expected:
            raise TransferError(f"{length} bytes came for {what}, expected {expected}")
        return self._fill_and_compare(parts, what)

    def hashes(self, some: Sequence[Chunk]) -> list[int]:
        """Their checksums, as the other side has them."""
        what = f"checksums of {len(some)} chunks"
        self.ask(Kind.HASHES, more=pack(some))
        body = self.body(Kind.HASHES, what)
        if len(body) != _HASH.size * len(some):
            raise TransferError(f"{len(body)} bytes came for {what}")
        return [value for (value,) in _HASH.iter_unpack(body)]

    # ---- who answers

    def request(self) -> Request | None:
        """The next one; None when the other side has closed: it needs nothing more."""
        data = memoryview(bytearray(_REQUEST.size))
        if not self._fill([data], "a request", may_end=True):
            return None
        magic, kind, tensor, offset, length = _REQUEST.unpack(data)
        if magic != _MAGIC or not 0 < kind <= max(Kind):
            raise TransferError(f"expected a request ({_MAGIC!r}), got {magic!r}, {kind}")
        asked = b""
        if kind in (Kind.OPEN, Kind.HASHES):
            if length > MAX_ASKED:
                raise TransferError(f"{length} bytes of a request, at most {MAX_ASKED} are read")
            asked = bytes(self._receive(length, "a request"))
        return Request(Kind(kind), Chunk(tensor, offset, length), asked)

    def send(self, kind: Kind, body: bytes | bytearray) -> None:
        """An answer."""
        if len(body) > MAX_BODY:
            raise TransferError(f"{kind.name} of {len(body)} bytes, at most {MAX_BODY} can be sent")
        self.send_parts(kind, [memoryview(body)])

    def send_parts(
        self, kind: Kind, parts: Sequence[memoryview], checksum: int | None = None
    ) -> int:
        """An answer whose body lies in several places; nothing is copied. Returns the checksum of
        the body, which is not computed where it is given."""
        header = memoryview(_ANSWER.pack(_MAGIC, kind, sum(map(len, parts))))
        if checksum is not None:
            self._send([header, *parts, memoryview(_HASH.pack(checksum))])
            return checksum
        hasher = xxhash.xxh3_64()
        front = [header]
        for group in _hot(parts):
            self._send([*front, *group])
            for piece in group:
                hasher.update(piece)
            front = []
        checksum = int(hasher.intdigest())
        self._send([*front, memoryview(_HASH.pack(checksum))])
        return checksum

    def send_hashes(self, values: Iterable[int]) -> None:
        self.send(Kind.HASHES, b"".join(map(_HASH.pack, values)))

    def refuse(self, reason: str) -> None:
        """Instead of an answer."""
        self.send(Kind.REFUSED, reason.encode())

    # ---- the socket

    def _body(self, length: int, what: str) -> bytes:
        if length > MAX_BODY:
            raise TransferError(f"{what} of {length} bytes, at most {MAX_BODY} are accepted")
        body = bytearray(length)
        self._fill_and_compare([memoryview(body)], what)
        return bytes(body)

    def _fill_and_compare(self, parts: Sequence[memoryview], what: str) -> int:
        """The checksum of what came."""
        hasher = xxhash.xxh3_64()
        for group in _hot(parts):
            self._fill(group, what)
            for piece in group:
                hasher.update(piece)
        (expected,) = _HASH.unpack(self._receive(_HASH.size, f"the checksum of {what}"))
        actual = int(hasher.intdigest())
        if actual != expected:
            raise TransferError(
                f"{what} came damaged: checksum {actual:016x}, expected {expected:016x}; pull again"
            )
        return actual

    def _receive(self, length: int, what: str) -> bytearray:
        data = bytearray(length)
        self._fill([memoryview(data)], what)
        return data

    def _send(self, parts: list[memoryview]) -> None:
        parts = [part for part in parts if part]
        while parts:
            self._check("sending")
            with suppress(BlockingIOError):
                parts = _behind(parts, self._sock.sendmsg(parts))

    def _fill(self, parts: Sequence[memoryview], what: str, *, may_end: bool = False) -> bool:
        """False where the stream `may_end` before the first byte, and has."""
        left, heard = [part for part in parts if part], time.monotonic()
        while left:
            self._check(what)
            try:
                came = self._sock.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError:
                if time.monotonic() - heard >= self._silence_s:
                    self._silent(what)
                continue
            if came == 0:
                if may_end:
                    return False
                raise TransferError(f"the stream ended within {what}")
            left, heard, may_end = _behind(left, came), time.monotonic(), False
        return True

    def _check(self, what: str) -> None:
        if time.monotonic() >= self._end:
            raise TimeoutError(f"{what}: not done within {self._deadline_s:g} s; pull elsewhere")


def pack(chunks: Iterable[Chunk]) -> bytes:
    """Descriptors, as they follow HASHES."""
    return b"".join(_DESCRIPTOR.pack(*chunk) for chunk in chunks)


def unpack(asked: bytes) -> list[Chunk]:
    """TransferError for what are no descriptors."""
    if len(asked) % _DESCRIPTOR.size:
        raise TransferError(f"{len(asked)} bytes are no descriptors of {_DESCRIPTOR.size}")
    return [Chunk(*fields) for fields in _DESCRIPTOR.iter_unpack(asked)]


def _timeval(seconds: float) -> tuple[int, int]:
    """Seconds and microseconds, not zero: that would be without end."""
    return divmod(max(1, int(seconds * 1e6)), 1_000_000)


def _behind(parts: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left behind the first `count` bytes."""
    left = list(parts)
    while left and count >= len(left[0]):
        count -= len(left.pop(0))
    if count:
        left[0] = left[0][count:]
    return left


def _hot(parts: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """All of it, in groups of pieces that are HOT bytes at most together."""
    group: list[memoryview] = []
    room = HOT
    for part in parts:
        for at in range(0, len(part), HOT):
            piece = part[at : at + HOT]
            if len(piece) > room:
                yield group
                group, room = [], HOT
            group.append(piece)
            room -= len(piece)
    if group:
        yield group
