"""State over a socket pair: straight into place, and no damage goes unnoticed."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn

from trainmover.runtime import raw
from trainmover.runtime.tracked import Tracked
from trainmover.runtime.transfer.donor import serve
from trainmover.runtime.transfer.extras import pull_extras, serve_extras
from trainmover.runtime.transfer.pulled import Pulled
from trainmover.runtime.transfer.puller import pull
from trainmover.runtime.transfer.wire import TransferError

DEADLINE_S = 20.0
MB = 1_000_000


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
    """Always with the same state."""
    torch.manual_seed(0)
    tracked, optimizer = rank()
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.rand_like(p)
    optimizer.step()
    return tracked


def small() -> Tracked:
    torch.manual_seed(0)
    tracked = Tracked()
    tracked.add(model=nn.Linear(4, 4))
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
Serve = Callable[[socket.socket], None]


class Donors:
    """A thread for every connection; `pull` asks all of them."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._serve: dict[str, Serve] = {}

    def add(self, worker: str, what: Tracked | Serve) -> None:
        """What it holds, or what it does with a connection."""
        self._serve[worker] = serving(what) if isinstance(what, Tracked) else what

    def pull(self, into: Tracked, **more: Any) -> Pulled:
        dials = {worker: self._dial(serve) for worker, serve in self._serve.items()}
        return pull(dials, into, **{"deadline_s": DEADLINE_S, **more})

    def _dial(self, serve: Serve) -> Callable[[], socket.socket]:
        def dial() -> socket.socket:
            ours, theirs = socket.socketpair()

            def run() -> None:
                with ours, suppress(TransferError, OSError):
                    serve(ours)

            thread = threading.Thread(target=run)
            self._threads.append(thread)
            thread.start()
            return theirs

        return dial

    def join(self) -> None:
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def serving(tracked: Tracked) -> Serve:
    return lambda sock: serve(
        sock, lambda names: tracked.offers.get(1, names), deadline_s=DEADLINE_S
    )


def served_quietly(tracked: Tracked, sock: socket.socket) -> None:
    with sock, suppress(TransferError, OSError):
        serving(tracked)(sock)


@pytest.fixture
def donors() -> Iterator[Donors]:
    found = Donors()
    yield found
    found.join()


def test_shared_state_arrives_in_place(donors: Donors) -> None:
    donor, (joiner, optimizer) = stepped(), rank()
    places = [p.data_ptr() for g in optimizer.param_groups for p in g["params"]]
    donors.add("w0", donor)
    pulled = donors.pull(joiner)
    assert pulled.digest == pulled.donor_digest == donor.shared_digest()
    assert places == [p.data_ptr() for g in optimizer.param_groups for p in g["params"]]
    assert joiner.state_digest() == donor.state_digest()
    assert pulled.bytes == pulled.donors["w0"] > 8 * MB
    assert pulled.again == 0


def test_several_donors_give_a_stripe_each_though_their_dicts_are_in_another_order(
    donors: Donors,
) -> None:
    one, other, (joiner, _) = stepped(), stepped(), rank()
    (optimizer,) = other.optimizers
    for p, state in optimizer.state.items():
        optimizer.state[p] = dict(reversed(state.items()))
    donors.add("w0", one)
    donors.add("w1", other)
    pulled = donors.pull(joiner)
    assert pulled.digest == pulled.donor_digest == one.shared_digest() == other.shared_digest()
    assert joiner.state_digest() == one.state_digest()
    assert min(pulled.donors.values()) > 0
    assert sum(pulled.donors.values()) < 9 * MB


def test_only_the_named_objects_are_taken(donors: Donors) -> None:
    donor, (joiner, optimizer) = stepped(), rank()
    donors.add("w0", donor)
    pulled = donors.pull(joiner, objects=("model",))
    assert pulled.digest == pulled.donor_digest == donor.register(("model",)).digest()
    assert joiner.object_digests()["model"] == donor.object_digests()["model"]
    assert not optimizer.state
    with pytest.raises(TransferError, match=r"refused: \['other'\] are not tracked here"):
        donors.pull(joiner, objects=("other",))


# ---- donors that go or err


def cut_after(tracked: Tracked, count: int, cut: threading.Event) -> Serve:
    """Serves until it has sent so many bytes on a connection; that is `cut` then."""

    def serve_some(sock: socket.socket) -> None:
        front, back = socket.socketpair()
        with front, back:
            thread = threading.Thread(target=served_quietly, args=(tracked, back), daemon=True)
            thread.start()

            def requests() -> None:
                with suppress(OSError):
                    while data := sock.recv(1 << 16):
                        front.sendall(data)
                    front.shutdown(socket.SHUT_WR)

            asking = threading.Thread(target=requests, daemon=True)
            asking.start()
            left = count
            while left and (data := front.recv(min(left, 1 << 16))):
                sock.sendall(data)
                left -= len(data)
            cut.set()
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            with suppress(OSError):
                front.shutdown(socket.SHUT_RDWR)
            asking.join(DEADLINE_S)
            thread.join(DEADLINE_S)

    return serve_some


@pytest.mark.parametrize("count", [0, 10, 300, 3_000, 100_000, 1_500_000, 2_500_000])
def test_what_a_donor_that_dies_did_not_send_comes_from_another(donors: Donors, count: int) -> None:
    donor, (joiner, _), cut = stepped(), rank(), threading.Event()
    donors.add("w0", cut_after(stepped(), count, cut))

    def serve_then(sock: socket.socket) -> None:
        assert cut.wait(DEADLINE_S)
        serving(donor)(sock)

    donors.add("w1", serve_then)
    with capture_logs() as logs:
        pulled = donors.pull(joiner)
    assert pulled.digest == pulled.donor_digest == donor.shared_digest()
    assert joiner.state_digest() == donor.state_digest()
    assert [log["event"] for log in logs] == ["pull.donor_left"]
    assert logs[0]["donor"] == "w0"


def test_a_silent_donor_is_left_out_while_another_is_there(donors: Donors) -> None:
    donor, (joiner, _), over = stepped(), rank(), threading.Event()

    def say_nothing(sock: socket.socket) -> None:
        over.wait(DEADLINE_S)

    donors.add("w0", say_nothing)
    donors.add("w1", donor)
    with capture_logs() as logs:
        pulled = donors.pull(joiner, silence_s=0.05)
    over.set()
    assert pulled.digest == pulled.donor_digest == donor.shared_digest()
    assert [log["error"] for log in logs] == ["nothing came for 0.05 s (an answer (OPEN))"]


def test_where_no_donor_is_left_all_their_reasons_are_said(donors: Donors) -> None:
    for worker in ("w0", "w1"):
        donors.add(worker, cut_after(stepped(), 1_500_000, threading.Event()))
    with capture_logs(), pytest.raises(TransferError, match=r"no donor is left: w.: .*; w.: "):
        donors.pull(rank()[0])


def other_weights(donor: Tracked) -> None:
    (optimizer,) = donor.optimizers
    optimizer.param_groups[0]["params"][1].data[-1, -1] += 1


def other_rate(donor: Tracked) -> None:
    (optimizer,) = donor.optimizers
    optimizer.param_groups[0]["lr"] = 0.5


@pytest.mark.parametrize("change", [other_weights, other_rate])
def test_a_donor_that_holds_other_state_is_named(
    donors: Donors, change: Callable[[Tracked], None]
) -> None:
    odd = stepped()
    change(odd)
    for worker, held in {"w0": stepped(), "w1": odd, "w2": stepped()}.items():
        donors.add(worker, held)
    with pytest.raises(TransferError, match=r"differ: w1 \(.*\) holds other state than w0, w2 "):
        donors.pull(rank()[0])


def test_a_rank_that_is_built_otherwise_says_what_differs(donors: Donors) -> None:
    donors.add("w0", stepped())
    with pytest.raises(ValueError, match=r"the donor has \['optimizer'\]"):
        donors.pull(small())


def test_a_pull_that_is_not_wanted_any_more_ends_at_once(donors: Donors) -> None:
    over, asked = threading.Event(), threading.Event()

    def wait(sock: socket.socket) -> None:
        asked.set()
        over.wait(DEADLINE_S)

    class Unwanted(Exception):
        pass

    def check() -> None:
        if asked.is_set():
            raise Unwanted

    donors.add("w0", wait)
    with pytest.raises(Unwanted):
        donors.pull(small(), check=check)
    over.set()


def test_a_joiner_whose_tensors_share_memory_does_not_look_right(donors: Donors) -> None:
    def two(joined: bool) -> Tracked:
        torch.manual_seed(0)
        memory = torch.rand(3, 1 << 18)
        parts = (memory[:2], memory[1:]) if joined else torch.rand(2, 2, 1 << 18)
        tracked = Tracked()
        tracked.add(model=nn.ParameterList([nn.Parameter(p) for p in parts]))
        return tracked

    donors.add("w0", two(joined=False))
    pulled = donors.pull(two(joined=True))
    assert pulled.digest != pulled.donor_digest


# ---- what a wire may bring


def played(answers: bytes) -> Callable[[], socket.socket]:
    """A donor whose answers were recorded."""
    here, there = socket.socketpair()
    here.sendall(answers)
    here.shutdown(socket.SHUT_WR)
    KEPT.append(here)
    return lambda: there


KEPT: list[socket.socket] = []


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    yield
    while KEPT:
        KEPT.pop().close()


def recorded(tracked: Tracked) -> bytes:
    """All that a donor answers to a pull of this small state."""
    said = bytearray()

    def dial() -> socket.socket:
        ours, theirs = socket.socketpair()
        front, back = socket.socketpair()

        def pump(source: socket.socket, target: socket.socket, log: bool) -> None:
            with suppress(OSError):
                while data := source.recv(1 << 16):
                    if log:
                        said.extend(data)
                    target.sendall(data)
            with suppress(OSError):
                target.shutdown(socket.SHUT_WR)

        for args in ((ours, front, False), (front, ours, True)):
            threading.Thread(target=pump, args=args, daemon=True).start()
        threading.Thread(target=served_quietly, args=(tracked, back), daemon=True).start()
        KEPT.extend((ours, front, back))
        return theirs

    pull({"w0": dial}, small(), deadline_s=DEADLINE_S)
    return bytes(said)


ANSWER, HASH = 13, 8
OPENED = ANSWER + 32 + HASH
"""The first answer, and its body."""


def damaged(stream: bytes, at: int) -> bytes:
    return stream[:at] + bytes([stream[at] ^ 1]) + stream[at + 1 :]


def text_bytes(stream: bytes) -> int:
    length: int = struct.unpack_from("!Q", stream, OPENED + 5)[0]
    return length


def the_read(stream: bytes) -> int:
    """Where the answer to the only read begins."""
    return OPENED + ANSWER + text_bytes(stream) + HASH


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: b"X" + s[1:], "expected OPEN"),
        (lambda s: damaged(s, 4), "expected OPEN|refused"),
        (lambda s: damaged(s, ANSWER + 3), "OPEN came damaged"),
        (lambda s: damaged(s, OPENED + 4), "expected STRUCTURE"),
        (lambda s: s[: OPENED + 5] + struct.pack("!Q", 1 << 40) + s[OPENED + 13 :], "at most"),
        (lambda s: damaged(s, OPENED + ANSWER + 9), "STRUCTURE came damaged"),
        (lambda s: damaged(s, the_read(s) + 4), "expected READ"),
        (lambda s: damaged(s, the_read(s) + 12), "bytes came for 80 bytes at 0 of tensor 0"),
        (lambda s: damaged(s, the_read(s) + ANSWER + 70), "80 bytes at 0 of tensor 0 came damaged"),
        (lambda s: damaged(s, len(s) - 1), "checksums of 1 chunks came damaged"),
        (lambda s: s[: len(s) - 60], "stream ended within 80 bytes at 0 of tensor 0"),
        (lambda s: s[:10], r"stream ended within an answer \(OPEN\)"),
    ],
)
def test_a_damaged_stream_is_an_error_that_says_what_came(
    change: Callable[[bytes], bytes], message: str
) -> None:
    stream = change(recorded(small()))
    with pytest.raises(TransferError, match=message):
        pull({"w0": played(stream)}, small(), deadline_s=DEADLINE_S)


def test_the_undamaged_recording_is_accepted() -> None:
    pulled = pull({"w0": played(recorded(small()))}, small(), deadline_s=DEADLINE_S)
    assert pulled.digest == pulled.donor_digest


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (struct.pack("!4sBIQI", b"TMv2", 5, 0, 0, 0), "expected a request for shared state"),
        (struct.pack("!4sBIQI", b"TMv2", 3, 0, 0, 4), "expected a request for shared state"),
        (struct.pack("!4sBIQI", b"TMv1", 1, 0, 0, 0), "expected a request"),
        (struct.pack("!4sBIQI", b"TMv2", 0, 0, 0, 0), "expected a request"),
        (struct.pack("!4sBIQI", b"TMv2", 1, 0, 0, 1 << 30), "at most 1048576 are read"),
        (struct.pack("!4sBIQI", b"TMv2", 1, 0, 0, 4), "stream ended within a request"),
    ],
)
def test_a_request_for_something_else_is_refused(pair: Pair, request_: bytes, message: str) -> None:
    pair[1].sendall(request_)
    pair[1].shutdown(socket.SHUT_WR)
    with pytest.raises(TransferError, match=message):
        serving(small())(pair[0])


@pytest.mark.parametrize(
    "chunk", [(0, 0, 81), (2, 0, 4), (0, 65, 4), (0, 0, 0), (0, 0, 1 << 30), (0, 1, 4)]
)
def test_bytes_outside_the_state_are_refused_and_the_next_read_is_answered(
    pair: Pair, start: Callable[..., Future[Any]], chunk: tuple[int, int, int]
) -> None:
    held = nn.Linear(4, 4)
    held.weight.data = torch.rand(4, 4).t()
    tracked = Tracked()
    tracked.add(model=held)
    served = start(serving(tracked), pair[0])
    answers = pair[1].makefile("rb")
    pair[1].sendall(struct.pack("!4sBIQI", b"TMv2", 1, 0, 0, 0))
    assert answers.read(OPENED)[4] == 1
    pair[1].sendall(struct.pack("!4sBIQI", b"TMv2", 3, *chunk))
    refused = answers.read(ANSWER)
    assert refused[4] == 0
    assert answers.read(struct.unpack_from("!Q", refused, 5)[0] + HASH)
    pair[1].sendall(struct.pack("!4sBIQI", b"TMv2", 3, 0, 0, 80))
    assert answers.read(ANSWER)[4] == 3
    assert len(answers.read(80 + HASH)) == 80 + HASH
    answers.close()
    pair[1].close()
    served.result(DEADLINE_S)


def test_a_silent_donor_ends_the_wait_at_the_deadline() -> None:
    here, there = socket.socketpair()
    with here, pytest.raises(TimeoutError, match=r"not done within 0\.05 s"):
        pull({"w0": lambda: there}, small(), deadline_s=0.05)


def test_a_puller_that_stops_reading_ends_the_serving_at_the_deadline(pair: Pair) -> None:
    read = struct.pack("!4sBIQI", b"TMv2", 3, 0, 0, 1 << 20)
    pair[1].sendall(struct.pack("!4sBIQI", b"TMv2", 1, 0, 0, 0) + 4 * read)
    tracked = stepped()
    with pytest.raises(TimeoutError, match="sending: not done within"):
        serve(pair[0], lambda names: tracked.register(names), deadline_s=0.2)


# ---- extras


def test_extras_arrive_whatever_their_size(pair: Pair, start: Callable[..., Future[Any]]) -> None:
    parts: Mapping[str, bytes] = {
        "": b"",
        "vars": b"x" * 3_000_000,
        "buffer.model.\u00e9": b"\n",
        **stepped().own(),
    }
    served = start(serve_extras, pair[0], parts, deadline_s=DEADLINE_S)
    got = pull_extras(pair[1], deadline_s=DEADLINE_S)
    served.result()
    assert got == parts


def test_who_asks_for_extras_gets_nothing_else(pair: Pair) -> None:
    pair[1].sendall(struct.pack("!4sBIQI", b"TMv2", 2, 0, 0, 0))
    with pytest.raises(TransferError, match="expected a request for EXTRAS, got STRUCTURE"):
        serve_extras(pair[0], {}, deadline_s=DEADLINE_S)


# ---- regions


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
        region = raw.Region(target)
        for offset in reversed(range(0, len(data), size)):
            piece = data[offset : offset + size]
            window = region.window(offset, len(piece))
            window.memory[:] = piece
            window.written()
        assert torch.equal(target, source)
        assert b"".join(bytes(piece) for _, piece in raw.pieces(target)) == data
