"""State over a connected blocking socket: the puller asks once, the donor answers once.

Request: magic, kind. Answer: magic, kind, length and xxh3_64 of a body (text of the structure, or
all extras), the body; for shared state then chunks, each with the number of its tensor, offset,
length and xxh3_64, in any order, and at the end the donor's digest. A chunk says where it belongs,
so that several donors may each send a stripe. Tensor bytes go straight to where they belong.
"""

import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import torch
import xxhash

from trainmover.runtime import raw
from trainmover.runtime.shared import Shared
from trainmover.runtime.tracked import Tracked

MAX_BODY = 1 << 30  # bytes; structure of 10 million tensors, far more than any extras
_MAGIC = b"TMv1"
_REQUEST = struct.Struct("!4sB")
_ANSWER = struct.Struct("!4sBQQ")  # magic, kind, length, xxh3_64
_CHUNK = struct.Struct("!IQIQ")  # tensor, offset, length, xxh3_64
_PART = struct.Struct("!II")  # lengths of name and value
_DIGEST_BYTES = 32  # xxh3_128, hex


class Kind(IntEnum):
    """What is asked for."""

    SHARED = 1
    EXTRAS = 2


class TransferError(Exception):
    """The other side broke the protocol, or the bytes did not survive the way; pull again."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """What came, and both digests of the shared state; the joiner is right where they are equal."""

    bytes: int
    seconds: float
    donor_digest: str
    digest: str


def serve(sock: socket.socket, shared: Shared, *, deadline_s: float) -> str:
    """Sends `shared` to one puller; blocks until all is handed to the kernel; returns its digest.

    The tensors must not change meanwhile. Raises TransferError, TimeoutError, ConnectionError.
    """
    wire = _Wire(sock, deadline_s)
    wire.await_request(Kind.SHARED)
    wire.send_body(Kind.SHARED, shared.meta)
    for index, tensor in enumerate(shared.tensors):
        for offset, piece in raw.pieces(tensor):
            checksum = xxhash.xxh3_64_intdigest(piece)
            wire.send(_CHUNK.pack(index, offset, len(piece), checksum), piece)
    digest = shared.digest()
    wire.send(digest.encode(), memoryview(b""))
    return digest


def pull(sock: socket.socket, tracked: Tracked, *, deadline_s: float) -> Pulled:
    """Fills `tracked` with a donor's shared state; blocks. Whether it is right: compare digests.

    Raises TransferError, TimeoutError, ConnectionError, or ValueError where this rank is built
    otherwise than the donor; after any of them the state here is partly overwritten.
    """
    wire = _Wire(sock, deadline_s)
    started = time.monotonic()
    wire.request(Kind.SHARED)
    meta = wire.receive_body(Kind.SHARED)
    destinations = tracked.receive(meta)
    _receive_chunks(wire, destinations)
    tracked.received()
    digest = tracked.shared_digest()
    donor_digest = bytes(wire.receive(_DIGEST_BYTES, "the donor's digest")).decode(
        "ascii", "replace"
    )
    total = len(meta) + sum(t.nbytes for t in destinations)
    return Pulled(total, time.monotonic() - started, donor_digest, digest)


def serve_extras(sock: socket.socket, parts: Mapping[str, bytes], *, deadline_s: float) -> None:
    """Sends the own state of a rank to one puller; blocks. Raises as `serve`."""
    wire = _Wire(sock, deadline_s)
    wire.await_request(Kind.EXTRAS)
    body = bytearray()
    for name, value in parts.items():
        key = name.encode()
        body += _PART.pack(len(key), len(value)) + key + value
    wire.send_body(Kind.EXTRAS, body)


def pull_extras(sock: socket.socket, *, deadline_s: float) -> dict[str, bytes]:
    """The own state of a rank, from who keeps it; blocks. Raises as `pull`."""
    wire = _Wire(sock, deadline_s)
    wire.request(Kind.EXTRAS)
    body = wire.receive_body(Kind.EXTRAS)
    parts: dict[str, bytes] = {}
    at = 0
    while at < len(body):
        if at + _PART.size > len(body):
            raise TransferError(f"extras end within the header of part {len(parts)}")
        key, value = _PART.unpack_from(body, at)
        at += _PART.size
        if at + key + value > len(body):
            raise TransferError(f"extras end within part {len(parts)}")
        parts[body[at : at + key].decode("utf-8", "replace")] = body[at + key : at + key + value]
        at += key + value
    return parts


def _receive_chunks(wire: "_Wire", destinations: list[torch.Tensor]) -> None:
    writers = [raw.Writer(t) for t in destinations]
    left = [t.nbytes for t in destinations]
    remaining = sum(left)
    while remaining:
        header = wire.receive(_CHUNK.size, "a chunk's header")
        index, offset, length, checksum = _CHUNK.unpack(header)
        if index >= len(writers) or length > left[index]:
            raise TransferError(
                f"{length} bytes for tensor {index} came, expected one of {len(writers)} tensors "
                "and no byte twice"
            )
        try:
            window = writers[index].window(offset, length)
        except ValueError as e:
            raise TransferError(f"tensor {index}: {e}") from e
        wire.receive_into(window, f"tensor {index}")
        _compare(window, checksum, f"{length} bytes at {offset} of tensor {index}")
        writers[index].written(offset)
        left[index] -= length
        remaining -= length


def _compare(data: bytes | memoryview, expected: int, what: str) -> None:
    actual = xxhash.xxh3_64_intdigest(data)
    if actual != expected:
        raise TransferError(
            f"{what} came damaged: checksum {actual:016x}, expected {expected:016x}; pull again"
        )


class _Wire:
    """A socket with one deadline for everything."""

    def __init__(self, sock: socket.socket, deadline_s: float) -> None:
        self._sock = sock
        self._deadline_s = deadline_s
        self._end = time.monotonic() + deadline_s

    def request(self, kind: Kind) -> None:
        self.send(_REQUEST.pack(_MAGIC, kind), memoryview(b""))

    def await_request(self, kind: Kind) -> None:
        magic, asked = _REQUEST.unpack(self.receive(_REQUEST.size, "a request"))
        if (magic, asked) != (_MAGIC, kind):
            raise TransferError(
                f"expected a request for {kind.name} ({_MAGIC!r}, {kind:d}), got {magic!r}, {asked}"
            )

    def send_body(self, kind: Kind, body: bytes | bytearray) -> None:
        if len(body) > MAX_BODY:
            raise TransferError(f"{kind.name} of {len(body)} bytes, at most {MAX_BODY} can be sent")
        checksum = xxhash.xxh3_64_intdigest(body)
        self.send(_ANSWER.pack(_MAGIC, kind, len(body), checksum), memoryview(body))

    def receive_body(self, kind: Kind) -> bytes:
        header = self.receive(_ANSWER.size, "an answer")
        magic, answered, length, checksum = _ANSWER.unpack(header)
        if (magic, answered) != (_MAGIC, kind):
            raise TransferError(
                f"expected {kind.name} ({_MAGIC!r}, {kind:d}), got {magic!r}, {answered}"
            )
        if length > MAX_BODY:
            raise TransferError(f"{kind.name} of {length} bytes, at most {MAX_BODY} are accepted")
        body = bytes(self.receive(length, kind.name))
        _compare(body, checksum, kind.name)
        return body

    def send(self, header: bytes, payload: memoryview) -> None:
        """Both in one system call where they fit; payload is not copied."""
        self._arm("sending")
        try:
            sent = self._sock.sendmsg([header, payload])
            if sent < len(header):
                self._sock.sendall(header[sent:])
            # Not an empty send: on a socket whose peer has all it needs and closed, it raises.
            if rest := payload[max(0, sent - len(header)) :]:
                self._sock.sendall(rest)
        except TimeoutError:
            raise self._late("sending") from None

    def receive(self, length: int, what: str) -> bytearray:
        data = bytearray(length)
        self.receive_into(memoryview(data), what)
        return data

    def receive_into(self, window: memoryview, what: str) -> None:
        at = 0
        while at < len(window):
            self._arm(what)
            try:
                came = self._sock.recv_into(window[at:])
            except TimeoutError:
                raise self._late(what) from None
            if came == 0:
                raise TransferError(f"the stream ended at byte {at} of {len(window)} of {what}")
            at += came

    def _arm(self, what: str) -> None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise self._late(what)
        self._sock.settimeout(left)

    def _late(self, what: str) -> TimeoutError:
        return TimeoutError(f"{what}: not done within {self._deadline_s} s; pull again elsewhere")
