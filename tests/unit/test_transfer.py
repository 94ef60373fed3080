"""State over a socket pair: straight into place, and no damage goes unnoticed."""

import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from trainmover.runtime import raw
from trainmover.runtime.shared import Shared
from trainmover.runtime.tracked import Tracked
from trainmover.runtime.transfer import (
    TransferError,
    pull,
    pull_extras,
    serve,
    serve_extras,
)

DEADLINE_S = 20.0


class Model(nn.Module):
    """Strides, dtypes and sizes that need care; over 1 MiB, so in several chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Parameter(torch.rand(700, 501))
        self.turned = nn.Parameter(torch.rand(400, 901).t())
        self.conv = nn.Parameter(torch.rand(4, 3, 5, 5).to(memory_format=torch.channels_last))
        self.low = nn.Parameter(torch.rand(3).bfloat16())
        self.whole = nn.Parameter(torch.arange(5), requires_grad=False)
        self.flag = nn.Parameter(torch.tensor(True), requires_grad=False)
        self.none = nn.Parameter(torch.empty(0, 4))


def rank() -> tuple[Tracked, torch.optim.Optimizer]:
    model = Model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    tracked = Tracked()
    tracked.add(model=model, optimizer=optimizer)
    return tracked, optimizer


def stepped() -> Tracked:
    tracked, optimizer = rank()
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.rand_like(p)
    optimizer.step()
    return tracked


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit


Pair = tuple[socket.socket, socket.socket]


def test_shared_state_arrives_in_place(pair: Pair, start: Callable[..., Future[Any]]) -> None:
    donor, (joiner, optimizer) = stepped(), rank()
    places = [p.data_ptr() for g in optimizer.param_groups for p in g["params"]]
    served = start(serve, pair[0], donor.shared(), deadline_s=DEADLINE_S)
    pulled = pull(pair[1], joiner, deadline_s=DEADLINE_S)
    assert pulled.digest == pulled.donor_digest == served.result() == donor.shared_digest()
    assert places == [p.data_ptr() for g in optimizer.param_groups for p in g["params"]]
    assert joiner.state_digest() == donor.state_digest()
    assert pulled.bytes > 8_000_000
    again = start(serve_extras, pair[0], donor.own(), deadline_s=DEADLINE_S)
    assert pull_extras(pair[1], deadline_s=DEADLINE_S) == donor.own()
    again.result()


def test_extras_arrive_whatever_their_size(pair: Pair, start: Callable[..., Future[Any]]) -> None:
    parts = {"": b"", "vars": b"x" * 3_000_000, "buffer.model.\u00e9": b"\n"}
    served = start(serve_extras, pair[0], parts, deadline_s=DEADLINE_S)
    got = pull_extras(pair[1], deadline_s=DEADLINE_S)
    served.result()
    assert got == parts


def recorded(shared: Shared) -> bytes:
    """All that a donor sends."""
    here, there = socket.socketpair()
    with here, there, ThreadPoolExecutor(1) as pool:
        here.sendall(b"TMv1\x01")
        served = pool.submit(serve, there, shared, deadline_s=DEADLINE_S)
        served.add_done_callback(lambda _: there.close())
        return b"".join(iter(lambda: here.recv(1 << 20), b""))


def small() -> Tracked:
    torch.manual_seed(0)
    tracked = Tracked()
    tracked.add(model=nn.Linear(4, 4))
    return tracked


def damaged(stream: bytes, at: int) -> bytes:
    return stream[:at] + bytes([stream[at] ^ 1]) + stream[at + 1 :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: b"X" + s[1:], "expected SHARED"),
        (lambda s: damaged(s, 4), "expected SHARED"),
        (lambda s: s[:5] + struct.pack("!Q", 1 << 40) + s[13:], "at most"),
        (lambda s: damaged(s, 30), "SHARED came damaged"),
        (lambda s: damaged(s, len(s) - 40), "bytes at 0 of tensor 1 came damaged"),
        (lambda s: s[: len(s) - 60], "stream ended at byte"),
        (lambda s: s[:10], "stream ended at byte 10 of 21 of an answer"),
        (
            lambda s: s.replace(struct.pack("!IQI", 1, 0, 16), struct.pack("!IQI", 7, 0, 16)),
            "one of",
        ),
        (
            lambda s: s.replace(struct.pack("!IQI", 1, 0, 16), struct.pack("!IQI", 1, 4, 16)),
            "part of",
        ),
    ],
)
def test_a_damaged_stream_is_an_error_that_says_what_came(
    pair: Pair, change: Callable[[bytes], bytes], message: str
) -> None:
    pair[0].sendall(change(recorded(small().shared())))
    pair[0].shutdown(socket.SHUT_WR)
    with pytest.raises(TransferError, match=message):
        pull(pair[1], small(), deadline_s=DEADLINE_S)


def test_the_undamaged_recording_is_accepted(pair: Pair) -> None:
    pair[0].sendall(recorded(small().shared()))
    pulled = pull(pair[1], small(), deadline_s=DEADLINE_S)
    assert pulled.digest == pulled.donor_digest


def test_a_wrong_digest_of_the_donor_shows(pair: Pair) -> None:
    stream = recorded(small().shared())
    pair[0].sendall(damaged(stream, len(stream) - 1))
    pulled = pull(pair[1], small(), deadline_s=DEADLINE_S)
    assert pulled.digest != pulled.donor_digest


def test_a_request_for_something_else_is_refused(pair: Pair) -> None:
    pair[1].sendall(b"TMv1\x02")
    with pytest.raises(TransferError, match="expected a request for SHARED"):
        serve(pair[0], small().shared(), deadline_s=DEADLINE_S)


def test_a_silent_donor_ends_the_wait_at_the_deadline(pair: Pair) -> None:
    with pytest.raises(TimeoutError, match=r"an answer: not done within 0\.05 s"):
        pull(pair[1], small(), deadline_s=0.05)


def test_a_puller_that_stops_reading_ends_the_serving_at_the_deadline(pair: Pair) -> None:
    pair[1].sendall(b"TMv1\x01")
    with pytest.raises(TimeoutError, match="sending: not done within"):
        serve(pair[0], stepped().shared(), deadline_s=0.2)


@pytest.mark.parametrize("shape", [(3, 5, 7), (1,), (2, 1, 4), (11, 3)])
def test_any_range_of_a_strided_tensor_is_written_in_row_major_order(
    shape: tuple[int, ...],
) -> None:
    source = torch.rand(shape)
    target = torch.zeros([2 * n for n in reversed(shape)])[
        tuple(slice(None, None, 2) for _ in shape)
    ]
    target = target.permute(*reversed(range(len(shape))))
    data = raw.to_bytes(source)
    for size in (4, 12, 28):
        target.zero_()
        writer = raw.Writer(target)
        for offset in reversed(range(0, len(data), size)):
            piece = data[offset : offset + size]
            writer.window(offset, len(piece))[:] = piece
            writer.written(offset)
        assert torch.equal(target, source)
        assert b"".join(bytes(piece) for _, piece in raw.pieces(target)) == data
