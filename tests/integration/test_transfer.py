"""State from several donors that are processes: one is killed, or stopped, in the middle."""

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from trainmover.bus.lifeline import die_with
from trainmover.runtime.endpoint import Connection, Endpoint
from trainmover.runtime.tracked import Tracked
from trainmover.runtime.transfer.donor import serve
from trainmover.runtime.transfer.puller import pull
from trainmover.runtime.transfer.wire import TransferError

pytestmark = pytest.mark.concurrent
LIMIT_S = 60.0
STATE_BYTES, TENSORS = 96_000_000, 24
READS = 5
"""Of a donor, before what befalls it: it has given some, and owes more."""


def rank(filled: bool) -> Tracked:
    tensors = [
        torch.full((STATE_BYTES // TENSORS // 4,), float(i + 1) * filled) for i in range(TENSORS)
    ]
    tracked = Tracked()
    tracked.add(model=torch.nn.ParameterList(tensors))
    return tracked


def donate(worker: str, folder: Path, fate: int | None, pipe: Pipe) -> None:
    """A donor; `fate` is the signal that it sends itself after some reads."""
    die_with(os.getppid())
    torch.set_num_threads(1)
    tracked, left = rank(filled=True), iter(range(READS))

    def allowed() -> bool:
        if fate is not None and next(left, None) is None:
            os.kill(os.getpid(), fate)
        return True

    def answer(connection: Connection) -> None:
        with suppress(TransferError, OSError):
            offer = partial(tracked.offers.get, connection.generation)
            serve(connection.sock, offer, deadline_s=LIMIT_S, allowed=allowed)
        connection.close()

    endpoint = Endpoint("j", worker, "m0", b"secret", folder)
    endpoint.serve("state", answer)
    pipe.send((os.getpid(), endpoint.addresses))
    signal.pause()


Donor = tuple[int, tuple[str, ...]]
"""Its pid and its addresses."""
Start = Callable[..., Donor]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a donor."""
    context = multiprocessing.get_context("fork")
    processes = []

    def one(worker: str, fate: int | None = None) -> Donor:
        ours, theirs = context.Pipe()
        process = context.Process(target=donate, args=(worker, tmp_path, fate, theirs))
        process.start()
        theirs.close()
        processes.append(process)
        assert ours.poll(LIMIT_S), f"{worker} did not start"
        donor: Donor = ours.recv()
        ours.close()
        return donor

    yield one
    for process in processes:
        process.kill()
        process.join()
        process.close()


@pytest.fixture
def joiner(tmp_path: Path) -> Iterator[Endpoint]:
    endpoint = Endpoint("j", "joiner", "m0", b"secret", tmp_path)
    yield endpoint
    endpoint.close()


def state_of(pid: int) -> str:
    """Of a process, as the kernel has it: T is stopped, Z dead."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def await_state(pid: int, state: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while state_of(pid) != state:
        assert time.monotonic() < deadline, f"{pid} is {state_of(pid)}, expected {state}"
        time.sleep(0.01)


@pytest.mark.parametrize("scheme", ["unix", pytest.param("tcp", marks=pytest.mark.full)])
def test_what_a_killed_and_a_stopped_donor_owe_comes_from_the_third(
    start: Start, joiner: Endpoint, scheme: str
) -> None:
    fates = {"w0": signal.SIGKILL, "w1": None, "w2": signal.SIGSTOP}
    donors = {worker: start(worker, fate) for worker, fate in fates.items()}

    def dial(worker: str) -> socket.socket:
        if worker == "w1":
            await_state(donors["w0"][0], "Z")
            await_state(donors["w2"][0], "T")
        addresses = tuple(a for a in donors[worker][1] if a.startswith(scheme))
        return joiner.dial(addresses, worker, "state", 2, LIMIT_S).sock

    tracked = rank(filled=False)
    with capture_logs() as logs:
        pulled = pull(
            {worker: partial(dial, worker) for worker in donors},
            tracked,
            deadline_s=LIMIT_S,
            silence_s=2.0,
        )
    assert pulled.digest == pulled.donor_digest == rank(filled=True).shared_digest()
    assert tracked.shared_digest() == pulled.digest
    assert 0 <= pulled.bytes - STATE_BYTES < 100_000  # the structure; no byte counts twice
    reasons = {log["donor"]: log["error"] for log in logs}
    assert reasons.keys() == {"w0", "w2"}
    assert "nothing came for 2.0 s" in reasons["w2"]
    assert 0 < pulled.again < STATE_BYTES / 4
    assert pulled.donors["w1"] > STATE_BYTES / 2
