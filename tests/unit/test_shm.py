"""Payloads in memory that both ends of a link map: what is read is what was written, in order."""

import os
import random
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmover.runtime import shm
from trainmover.runtime.fence import Fence, Revoked
from trainmover.runtime.link import Link, LinkBroken
from trainmover.runtime.shm import SLOTS, Memory
from trainmover.runtime.wire import Header, Kind, Op, WireError

GENERATION = 5
BODIES = [random.Random(n).randbytes(n * 7_001 + 1) for n in range(20)]


def memories() -> tuple[Memory, Memory]:
    fd = shm.create()
    other = os.dup(fd)
    return Memory(fd, dialer=True), Memory(other, dialer=False)


class Pair:
    """Both ends of one link."""

    def __init__(self) -> None:
        self.fence = Fence()
        self.fence.open(GENERATION)
        socks, shared = socket.socketpair(), memories()
        self.a, self.b = (
            Link(sock, 1 - i, f"w{1 - i}", "0-1#0", GENERATION, self.fence, memory)
            for i, (sock, memory) in enumerate(zip(socks, shared, strict=True))
        )

    def close(self) -> None:
        self.a.close()
        self.b.close()
        self.fence.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def head(body: bytes, kind: Kind) -> bytes:
    return Header(len(body), GENERATION, 0, 1, kind, Op.NONE, len(body)).pack()


def send(link: Link, body: bytes) -> Kind:
    """As a collective does: in shared memory while there is room."""
    if link.is_room:
        assert link.share(GENERATION, head(body, Kind.SHARED), memoryview(body))
        return Kind.SHARED
    assert link.push(GENERATION, head(body, Kind.DATA), memoryview(body))
    return Kind.DATA


def receive(link: Link) -> bytes:
    with link.lock:
        came = link.header()
        assert came is not None
        if came.kind is Kind.SHARED:
            body = bytes(link.shared())
            link.used()
            return body
        view = bytearray(came.payload)
        got = 0
        while got < came.payload:
            got += link.body(memoryview(view)[got : got + 10_000])
        return bytes(view)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(BODIES)), max_size=40))
def test_frames_of_either_way_come_whole_and_in_order(moves: list[tuple[bool, bytes]]) -> None:
    pair = Pair()
    waiting: list[bytes] = []
    for sends, body in moves:
        if sends and sum(map(len, waiting)) < 100_000:  # what the socket surely takes
            send(pair.a, body)
            waiting.append(body)
        elif waiting:
            assert receive(pair.b) == waiting.pop(0)
    while waiting:
        assert receive(pair.b) == waiting.pop(0)
    assert pair.b.header() is None
    pair.close()


def test_both_directions_have_slots_of_their_own(pair: Pair) -> None:
    there, back = b"there" * 9_000, b"back" * 9_000
    send(pair.a, there)
    send(pair.b, back)
    assert receive(pair.a) == back
    assert receive(pair.b) == there


def test_with_every_slot_taken_the_payload_travels_on_the_socket(pair: Pair) -> None:
    body = b"x" * 20_000
    kinds = [send(pair.a, body) for _ in range(SLOTS + 1)]
    assert kinds == [Kind.SHARED] * SLOTS + [Kind.DATA]
    assert receive(pair.b) == body
    assert pair.a.is_room


def test_a_payload_of_an_older_generation_is_dropped_and_its_slot_freed(pair: Pair) -> None:
    for _ in range(SLOTS):
        send(pair.a, b"old" * 10_000)
    pair.fence.revoke(GENERATION, "test")
    for link in (pair.a, pair.b):
        link.renew(GENERATION + 1, marker=True)
    left = [pair.a, pair.b]
    for _ in range(10):
        left = [link for link in left if not link.renewed()]
    assert not left
    assert pair.a.is_room


def test_nothing_is_written_once_the_generation_has_ended(pair: Pair) -> None:
    send(pair.a, b"a" * 20_000)
    before = bytes(pair.b._memory.into.oldest())  # type: ignore[union-attr]
    pair.fence.revoke(GENERATION, "test")
    body = b"b" * 20_000
    with pytest.raises(Revoked):
        pair.a.share(GENERATION, head(body, Kind.SHARED), memoryview(body))
    assert bytes(pair.b._memory.into.oldest()) == before  # type: ignore[union-attr]


def test_a_payload_in_memory_that_a_link_does_not_have_breaks_it() -> None:
    fence = Fence()
    fence.open(GENERATION)
    near, far = socket.socketpair()
    link = Link(near, 1, "w1", "0-1#0", GENERATION, fence)
    far.sendall(head(b"x" * 20_000, Kind.SHARED))
    with pytest.raises(LinkBroken, match="where there is none"):
        link.header()
    link.close()
    far.close()
    fence.close()


def test_memory_of_another_size_is_refused_and_closed() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, 4096)
    with pytest.raises(WireError, match="same release"):
        Memory(fd, dialer=False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
