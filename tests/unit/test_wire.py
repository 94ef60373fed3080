"""Frames and greetings, as bytes."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmover.runtime import wire
from trainmover.runtime.wire import Header, Kind, Op, WireError

HELLO = wire.Hello(job="j", worker="w0", generation=3, channel="0-1#0", nonce="0" * 32)
WORD = st.integers(0, 2**32 - 1)


@given(
    st.builds(
        Header,
        payload=st.integers(0, wire.FRAME_BYTES),
        generation=WORD,
        step=WORD,
        seq=WORD,
        kind=st.just(Kind.DATA),
        op=st.sampled_from(Op),
        total=st.integers(wire.FRAME_BYTES, 2**64 - 1),
    )
)
def test_a_header_survives_packing(header: Header) -> None:
    packed = header.pack()
    assert len(packed) == wire.HEADER_BYTES
    assert wire.unpack_header(b"xx" + packed, 2) == header


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((wire.FRAME_BYTES + 1, 1, 0, 0, 1, 0, 2**30), "frame of at most"),
        ((0, 1, 0, 0, 99, 0, 0), "known frame kind and op"),
        ((0, 1, 0, 0, 1, 99, 0), "known frame kind and op"),
        ((8, 1, 0, 0, 1, 0, 7), "got DATA of 7"),
        ((0, 1, 0, 0, 2, 0, wire.CONTROL_BYTES + 1), "got VOTE"),
    ],
)
def test_a_header_out_of_bounds_is_refused(fields: tuple[int, ...], message: str) -> None:
    with pytest.raises(WireError, match=message):
        wire.unpack_header(struct.pack("<IIIIBBQ", *fields))


def test_a_long_message_is_cut_into_frames_that_name_its_size() -> None:
    payload = bytes(range(256)) * 4097  # two frames and a rest
    frames = wire.message_frames(Kind.EXTRAS, 4, 7, payload)
    headers = [wire.unpack_header(head) for head, _ in frames]
    assert [h.payload for h in headers] == [wire.FRAME_BYTES, wire.FRAME_BYTES, 256]
    assert {(h.total, h.generation, h.step) for h in headers} == {(len(payload), 4, 7)}
    assert b"".join(body for _, body in frames) == payload


def test_an_empty_message_is_one_frame() -> None:
    assert len(wire.message_frames(Kind.VOTE, 1, 0, b"")) == 1


def test_a_message_over_the_limit_is_refused_where_it_is_made() -> None:
    with pytest.raises(ValueError, match="at most 8388608 bytes, got 8388609"):
        wire.message_frames(Kind.EXTRAS, 1, 0, bytes(wire.CONTROL_BYTES + 1))


def test_a_greeting_survives_its_encoding() -> None:
    data = wire.encode_greeting(HELLO)
    assert wire.greeting_length(data[: wire.PRELUDE_BYTES]) == len(data) - wire.PRELUDE_BYTES
    assert wire.decode_greeting(data[wire.PRELUDE_BYTES :], wire.Hello) == HELLO


def test_another_version_is_refused_by_its_name() -> None:
    with pytest.raises(WireError, match="TMV0"):
        wire.greeting_length(b"TMV0\x00\x00")


def test_an_endless_greeting_is_refused() -> None:
    with pytest.raises(WireError, match="at most 4096"):
        wire.greeting_length(wire.MAGIC + b"\xff\xff")


def test_a_refusal_carries_its_reason() -> None:
    body = wire.encode_refusal("no such job")[wire.PRELUDE_BYTES :]
    with pytest.raises(wire.Refused, match="no such job"):
        wire.decode_greeting(body, wire.Welcome)


@given(st.binary(max_size=200))
def test_garbage_is_never_a_greeting(body: bytes) -> None:
    with pytest.raises((WireError, wire.Refused)):
        wire.decode_greeting(body, wire.Hello)


def test_a_proof_counts_for_its_role_and_conversation_only() -> None:
    given_proof = wire.proof(b"secret", "dialer", HELLO, "w1", "1" * 32)
    other = HELLO.model_copy(update={"generation": 4})
    assert wire.proven(b"secret", "dialer", HELLO, "w1", "1" * 32, given_proof)
    assert not wire.proven(b"other", "dialer", HELLO, "w1", "1" * 32, given_proof)
    assert not wire.proven(b"secret", "acceptor", HELLO, "w1", "1" * 32, given_proof)
    assert not wire.proven(b"secret", "dialer", other, "w1", "1" * 32, given_proof)
    assert not wire.proven(b"secret", "dialer", HELLO, "w1", "2" * 32, given_proof)
