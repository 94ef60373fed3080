"""The bytes on a link: frame headers, and the handshake that comes before the first frame."""

import hashlib
import hmac
import json
import struct
from enum import IntEnum
from typing import Annotated, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAGIC = b"TMV1"
FRAME_BYTES = 512 * 1024
"""Payload of one frame at most. Each costs Python, half as large ones a sixth more CPU at 16 MiB
over TCP; larger ones leave the cache, and take longer to drain after an abort."""
CONTROL_BYTES = 8 * 1024 * 1024
"""A control message at most; one over `FRAME_BYTES` travels in several frames."""
GREETING_BYTES = 4096
"""A handshake message at most: a stranger cannot make us hold more."""

_HEADER = struct.Struct("<IIIIBBQ")
_LENGTH = struct.Struct("<H")
HEADER_BYTES = _HEADER.size
PRELUDE_BYTES = len(MAGIC) + _LENGTH.size


class WireError(Exception):
    """Bytes that break the protocol of a link."""


class Refused(Exception):
    """The other side of a handshake said no; the text is its reason."""


class Kind(IntEnum):
    """What a frame carries."""

    DATA = 1
    VOTE = 2
    RESULT = 3
    EXTRAS = 4
    EXTRAS_ACK = 5
    MARKER = 6
    SHARED = 7
    """DATA whose payload lies in memory that both ends map (shm.py); nothing follows."""


class Op(IntEnum):
    """The collective that a DATA frame belongs to; NONE for all other kinds."""

    NONE = 0
    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    REDUCE = 5
    BARRIER = 6
    GATHER = 7
    SCATTER = 8
    ALL_TO_ALL = 9
    SEND = 10


_KINDS = {int(kind): kind for kind in Kind}  # Kind(n) costs 0.7 us, a look-up 0.04
_OPS = {int(op): op for op in Op}


class Header(NamedTuple):
    """One frame's header; a tuple because it is made for every frame."""

    payload: int
    """Bytes that follow, at most FRAME_BYTES."""
    generation: int
    step: int
    """Step of a control message, tag of a send, else 0."""
    seq: int
    kind: Kind
    op: Op
    total: int
    """Bytes of the whole message or collective that the frame belongs to."""

    def pack(self) -> bytes:
        """The header as HEADER_BYTES bytes."""
        return _HEADER.pack(*self)


def unpack_header(buffer: bytes | bytearray | memoryview, offset: int = 0) -> Header:
    """Read a header at `offset`; raises WireError for what no honest peer sends."""
    payload, generation, step, seq, kind, op, total = _HEADER.unpack_from(buffer, offset)
    if payload > FRAME_BYTES:
        raise WireError(
            f"expected a frame of at most {FRAME_BYTES} bytes, got {payload}: close the link"
        )
    try:
        header = Header(payload, generation, step, seq, _KINDS[kind], _OPS[op], total)
    except KeyError:
        raise WireError(
            f"expected a known frame kind and op, got {kind} and {op}: close the link"
        ) from None
    bulk = header.kind in (Kind.DATA, Kind.SHARED)
    if total < payload or (not bulk and total > CONTROL_BYTES):
        raise WireError(
            f"expected a message of {payload} to {CONTROL_BYTES} bytes, got {header.kind.name} "
            f"of {total}: close the link"
        )
    return header


def message_frames(
    kind: Kind, generation: int, step: int, payload: bytes, seq: int = 0
) -> list[tuple[bytes, bytes]]:
    """Cut a control message into (header, body) frames; raises ValueError over CONTROL_BYTES."""
    if len(payload) > CONTROL_BYTES:
        raise ValueError(
            f"expected a {kind.name} message of at most {CONTROL_BYTES} bytes, got {len(payload)}: "
            "track less per-rank state, or mark it as sharded"
        )
    if len(payload) <= FRAME_BYTES:
        head = _HEADER.pack(len(payload), generation, step, seq, kind, Op.NONE, len(payload))
        return [(head, payload)]
    pieces = [payload[i : i + FRAME_BYTES] for i in range(0, len(payload), FRAME_BYTES)]
    return [
        (Header(len(p), generation, step, seq, kind, Op.NONE, len(payload)).pack(), p)
        for p in pieces
    ]


_Text = Annotated[str, Field(min_length=1, max_length=1024)]
_Nonce = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Greeting(BaseModel):
    model_config = ConfigDict(frozen=True)


class Hello(_Greeting):
    """First message, from the dialer."""

    job: _Text
    worker: _Text
    generation: Annotated[int, Field(ge=0, lt=2**32)]
    channel: _Text
    nonce: _Nonce


class Welcome(_Greeting):
    """Second message: the acceptor names itself and proves that it knows the secret."""

    worker: _Text
    nonce: _Nonce
    proof: _Digest


class Answer(_Greeting):
    """Third message: the dialer's proof."""

    proof: _Digest


class Verdict(_Greeting):
    """Last message, from the acceptor: the connection counts from here on."""

    accepted: bool


MessageT = TypeVar("MessageT", bound=_Greeting)


def encode_greeting(message: BaseModel) -> bytes:
    """A handshake message with magic and length; raises ValueError over GREETING_BYTES."""
    return _framed(message.model_dump_json().encode())


def encode_refusal(reason: str) -> bytes:
    """The message that ends a handshake, with the reason for the other side's log."""
    return _framed(json.dumps({"refused": reason[:1000]}).encode())


def _framed(body: bytes) -> bytes:
    if len(body) > GREETING_BYTES:
        raise ValueError(f"expected a greeting of at most {GREETING_BYTES} bytes, got {len(body)}")
    return MAGIC + _LENGTH.pack(len(body)) + body


def greeting_length(prelude: bytes) -> int:
    """Bytes of the greeting that follow its first PRELUDE_BYTES; raises WireError."""
    if prelude[: len(MAGIC)] != MAGIC:
        raise WireError(
            f"expected a link of version {MAGIC!r}, got {prelude[: len(MAGIC)]!r}: "
            "run the same release of trainmover everywhere"
        )
    (length,) = _LENGTH.unpack(prelude[len(MAGIC) :])
    if length > GREETING_BYTES:
        raise WireError(f"expected a greeting of at most {GREETING_BYTES} bytes, got {length}")
    return int(length)


def decode_greeting(body: bytes, expected: type[MessageT]) -> MessageT:
    """Parse a handshake message; raises Refused for a refusal, else WireError."""
    try:
        fields = json.loads(body)
        if isinstance(fields, dict) and "refused" in fields:
            raise Refused(str(fields["refused"]))
        return expected.model_validate(fields)
    except (ValueError, RecursionError, ValidationError) as error:
        raise WireError(f"expected a {expected.__name__}, got {body[:80]!r}: {error}") from None


def proof(secret: bytes, role: str, hello: Hello, acceptor: str, nonce: str) -> str:
    """HMAC-SHA256 over the role and what both sides said, so that neither can be replayed."""
    said = "\n".join((role, hello.model_dump_json(), acceptor, nonce))
    return hmac.new(secret, said.encode(), hashlib.sha256).hexdigest()


def proven(secret: bytes, role: str, hello: Hello, acceptor: str, nonce: str, given: str) -> bool:
    """Whether `given` is the `proof` of that role; compares in constant time."""
    return hmac.compare_digest(proof(secret, role, hello, acceptor, nonce), given)
