"""One link over a socket pair: generations, half frames, the fence."""

import os
import random
import select
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmover.runtime.fence import Fence, Revoked
from trainmover.runtime.link import Link, LinkBroken
from trainmover.runtime.pump import Pump
from trainmover.runtime.wire import HEADER_BYTES, Header, Kind, Op, unpack_header


@pytest.fixture
def fence() -> Iterator[Fence]:
    made = Fence()
    made.open(5)
    yield made
    made.close()


@pytest.fixture
def far() -> Iterator[socket.socket]:
    """The peer's end, driven by hand; `near` is found through it."""
    near, peer = socket.socketpair()
    peer.settimeout(2)
    NEAR[peer] = near
    yield peer
    NEAR.pop(peer).close()
    peer.close()


NEAR: dict[socket.socket, socket.socket] = {}


def link_to(far: socket.socket, fence: Fence) -> Link:
    return Link(NEAR[far], 1, "w1", "0-1#0", fence.generation, fence)


def frame(generation: int, body: bytes, kind: Kind = Kind.DATA) -> bytes:
    return Header(len(body), generation, 0, 1, kind, Op.NONE, len(body)).pack() + body


def header(link: Link, fence: Fence, generation: int) -> Header | None:
    with link.lock:
        fence.check(generation)
        return link.header()


def read(link: Link, fence: Fence, generation: int) -> bytes | None:
    came = header(link, fence, generation)
    if came is None:
        return None
    body = bytearray(came.payload)
    with link.lock:
        got = link.body(memoryview(body))
    return bytes(body[:got])


def test_a_frame_of_an_older_generation_is_dropped(far: socket.socket, fence: Fence) -> None:
    link = link_to(far, fence)
    far.sendall(frame(4, b"old" * 20_000) + frame(5, b"new"))
    assert read(link, fence, 5) == b"new"


@given(
    st.lists(st.integers(0, 20_000), min_size=1, max_size=6),
    st.lists(st.integers(1, 40_000), max_size=12),
)
def test_frames_come_whole_wherever_the_stream_is_cut(sizes: list[int], cuts: list[int]) -> None:
    near, far = socket.socketpair()
    fence = Fence()
    fence.open(5)
    link = Link(near, 1, "w1", "0-1#0", 5, fence)
    bodies = [random.Random(n).randbytes(size) for n, size in enumerate(sizes)]
    stream, got = b"".join(frame(5, body) for body in bodies), []
    view, at = bytearray(), 0
    for cut in [*cuts, len(stream)]:
        far.sendall(stream[:cut])
        stream = stream[cut:]
        while (came := header(link, fence, 5)) is not None:
            view = view or bytearray(came.payload)
            at += link.body(memoryview(view)[at:])
            if at < came.payload:
                break
            got.append(bytes(view))
            view, at = bytearray(), 0
    assert got == bodies
    near.close()
    far.close()
    fence.close()


def test_a_header_that_is_here_comes_with_the_payload_before_it(
    far: socket.socket, fence: Fence
) -> None:
    link = link_to(far, fence)
    far.sendall(frame(5, b"a" * 20_000) + frame(5, b"b" * 20_000))
    assert read(link, fence, 5) == b"a" * 20_000
    assert link.has_unread
    assert read(link, fence, 5) == b"b" * 20_000
    assert not link.has_unread


def test_a_frame_of_a_newer_generation_waits_until_the_link_is_renewed(
    far: socket.socket, fence: Fence
) -> None:
    link = link_to(far, fence)
    far.sendall(frame(6, b"", Kind.MARKER) + frame(6, b"later"))
    assert header(link, fence, 5) is None
    assert link.holds_newer
    fence.revoke(5, "test")
    link.renew(6, marker=True)
    assert link.renewed()
    fence.open(6)
    assert read(link, fence, 6) == b"later"


def test_a_frame_half_received_is_drained_after_the_abort(far: socket.socket, fence: Fence) -> None:
    link = link_to(far, fence)
    old = frame(5, b"x" * 1000)
    far.sendall(old[:300])
    buffer = bytearray(b"." * 1000)
    assert header(link, fence, 5) is not None
    link.body(memoryview(buffer))
    fence.revoke(5, "test")
    seen = bytes(buffer)
    far.sendall(old[300:] + frame(6, b"", Kind.MARKER) + frame(6, b"next"))
    with pytest.raises(Revoked):
        header(link, fence, 5)
    link.renew(6, marker=True)
    assert link.renewed()
    fence.open(6)
    assert read(link, fence, 6) == b"next"
    assert bytes(buffer) == seen


def test_a_frame_half_sent_is_completed_with_zeros_before_the_marker(
    far: socket.socket, fence: Fence
) -> None:
    link = link_to(far, fence)
    body = memoryview(b"y" * 200_000)
    head = Header(len(body), 5, 0, 1, Kind.DATA, Op.NONE, len(body)).pack()
    assert not link.push(5, head, body, at_most=HEADER_BYTES)
    link.flush(5, at_most=1000)
    fence.revoke(5, "test")
    link.renew(6, marker=True)
    received = bytearray()
    while len(received) < 2 * HEADER_BYTES + len(body):
        link.renewed()
        received += far.recv(1 << 16)
    sent = bytes(received[HEADER_BYTES : HEADER_BYTES + len(body)])
    assert sent == b"y" * 1000 + bytes(len(body) - 1000)
    assert unpack_header(received, HEADER_BYTES + len(body)).kind is Kind.MARKER


def test_an_eof_breaks_the_link_and_names_the_peer(far: socket.socket, fence: Fence) -> None:
    link = link_to(far, fence)
    far.shutdown(socket.SHUT_RDWR)
    with pytest.raises(LinkBroken, match=r"rank 1 \(w1\) in channel 0-1#0"):
        header(link, fence, 5)
    with pytest.raises(LinkBroken):
        link.push(5, frame(5, b"body")[:HEADER_BYTES], memoryview(b"body"))


def test_bytes_that_are_no_frame_break_the_link(far: socket.socket, fence: Fence) -> None:
    link = link_to(far, fence)
    far.sendall(b"\xff" * 64)
    with pytest.raises(LinkBroken, match="frame of at most"):
        header(link, fence, 5)


def test_revoke_waits_for_the_copy_under_way_and_later_ones_are_refused(
    far: socket.socket, fence: Fence
) -> None:
    link = link_to(far, fence)
    returned = threading.Event()

    def revoke() -> None:
        fence.revoke(5, "test")
        returned.set()

    with link.lock:
        thread = threading.Thread(target=revoke)
        thread.start()
        assert select.select([fence.wake_fd], [], [], 2)[0]
        assert not returned.is_set()
    assert returned.wait(2)
    thread.join()
    with pytest.raises(Revoked, match="generation 5 has ended"):
        header(link, fence, 5)


def test_the_fence_ends_only_the_generation_that_is_named(fence: Fence) -> None:
    assert not fence.revoke(4, "late")
    fence.check(5)
    assert fence.revoke(5, "now")
    assert not fence.revoke(5, "again")
    assert fence.cause == "now"
    with pytest.raises(ValueError, match="above 5, got 5"):
        fence.open(5)
    fence.open(6)
    with pytest.raises(Revoked):
        fence.check(5)
    assert not select.select([fence.wake_fd], [], [], 0)[0]


def test_the_pump_delivers_whole_messages_both_ways(far: socket.socket, fence: Fence) -> None:
    link = link_to(far, fence)
    pump = Pump([link], fence)
    pump.send(1, Kind.VOTE, 9, b"yes")
    got: list[tuple[Kind, bytes]] = []
    far.sendall(
        frame(4, b"late", Kind.VOTE) + frame(5, b"no", Kind.VOTE) + frame(5, b"", Kind.RESULT)
    )

    def handle(rank: int, header: Header, payload: bytes) -> None:
        got.append((header.kind, payload))

    pump.run(handle, lambda: len(got) == 2, 2)
    assert got == [(Kind.VOTE, b"no"), (Kind.RESULT, b"")]
    assert far.recv(100).endswith(b"yes")


def test_the_pump_goes_on_sending_what_the_connection_does_not_take_at_once(
    far: socket.socket, fence: Fence
) -> None:
    pump = Pump([link_to(far, fence)], fence)
    payload = bytes(range(256)) * 4096 * 3
    pump.send(1, Kind.EXTRAS, 9, payload)
    got = bytearray()

    def read_all() -> None:
        while len(got) < len(payload):
            got.extend(far.recv(1 << 16))

    reader = threading.Thread(target=read_all)
    reader.start()
    pump.run(lambda *_: None, lambda: True, 5)
    reader.join(5)
    assert not reader.is_alive()


def test_messages_behind_one_that_waits_for_room_leave_in_their_order(
    far: socket.socket, fence: Fence
) -> None:
    pump = Pump([link_to(far, fence)], fence)
    bodies = [b"first" * 1_000_000, b"second", b"third"]
    for body in bodies:
        pump.send(1, Kind.EXTRAS, 9, body)
    assert len(pump.unsent) == 1
    got: list[bytes] = []

    def read_all() -> None:
        reader = Link(far, 0, "w0", "0-1#0", fence.generation, fence)
        theirs = Pump([reader], fence)
        theirs.run(lambda rank, header, body: got.append(body), lambda: len(got) == 3, 5)

    reader = threading.Thread(target=read_all)
    reader.start()
    pump.run(lambda *_: None, lambda: True, 5)
    reader.join(5)
    assert got == bodies
    assert not pump.unsent


def test_nothing_is_sent_once_the_generation_has_ended(far: socket.socket, fence: Fence) -> None:
    pump = Pump([link_to(far, fence)], fence)
    fence.revoke(5, "now")
    with pytest.raises(Revoked):
        pump.send(1, Kind.VOTE, 9, b"yes")
    assert not select.select([far], [], [], 0)[0]


def test_the_pump_takes_a_message_that_comes_in_pieces_and_two_that_come_at_once(
    far: socket.socket, fence: Fence
) -> None:
    link = link_to(far, fence)
    sent = frame(5, b"x" * 40_000, Kind.EXTRAS) + frame(5, b"yes", Kind.VOTE)
    sent += frame(5, b"no", Kind.RESULT)
    got: list[bytes] = []
    pump = Pump([link], fence)
    for cut in (sent[:10], sent[10:5000], sent[5000:-7]):
        far.sendall(cut)
        with pytest.raises(TimeoutError):
            pump.run(lambda rank, header, payload: got.append(payload), lambda: False, 0.02)
    far.sendall(sent[-7:])
    pump.run(lambda rank, header, payload: got.append(payload), lambda: len(got) == 3, 5)
    assert got == [b"x" * 40_000, b"yes", b"no"]


def test_the_pump_leaves_a_newer_generation_alone_and_reads_what_came_with_its_marker(
    far: socket.socket, fence: Fence
) -> None:
    link = link_to(far, fence)
    far.sendall(frame(6, b"", Kind.MARKER) + frame(6, b"later", Kind.VOTE))
    got: list[bytes] = []

    def handle(rank: int, header: Header, payload: bytes) -> None:
        got.append(payload)

    with pytest.raises(TimeoutError):
        Pump([link], fence).run(handle, lambda: False, 0.02)
    fence.revoke(5, "test")
    link.renew(6, marker=True)
    assert link.renewed()
    fence.open(6)
    Pump([link], fence).run(handle, lambda: bool(got), 5)
    assert got == [b"later"]


def test_the_pump_names_whom_it_waits_for(far: socket.socket, fence: Fence) -> None:
    link = link_to(far, fence)
    with pytest.raises(TimeoutError, match=r"rank 1 \(w1\)"):
        Pump([link], fence).run(lambda *_: None, lambda: False, 0.02)


def test_a_revocation_wakes_the_pump(far: socket.socket, fence: Fence) -> None:
    link = link_to(far, fence)
    timer = threading.Timer(0.02, fence.revoke, (5, "test"))
    timer.start()
    with pytest.raises(Revoked):
        Pump([link], fence).run(lambda *_: None, lambda: False, 5)
    timer.join()


def test_a_forked_child_does_not_hold_the_connection(far: socket.socket, fence: Fence) -> None:
    link = link_to(far, fence)
    parent, child = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(parent, 1)  # lives on, as a DataLoader worker does
        os._exit(0)
    link.close()
    assert far.recv(1) == b""
    os.write(child, b"x")
    os.waitpid(pid, 0)
    os.close(parent)
    os.close(child)
