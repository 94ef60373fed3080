"""How fast a joiner gets its state: ours beside a bare socket copy of the same bytes, in turns.

    python bench/transfer.py --out /tmp/transfer
    python bench/transfer.py --sizes 100M --donors 1 --pairs 5     # quickly

Processes that hold the same tensors are donors; one more, whose tensors are there and touched,
takes them. Ours is what a recovery does, all of it: the connections are dialed and authenticated,
the structure comes, the bytes with a checksum for each chunk, and the digests are compared. Bare
is `sendall` and `recv_into` of the same bytes between the same processes over as many connections,
which are open before the clock starts, in pieces as large, and nothing else. Bare again is the same
once more, since only a second copy shows what a ratio of equals looks like here. With several
donors each gives a part in both. The systems take turns, there and back.

A share is the throughput of a turn over that of the bare turn beside it: median, and its 95 %
bootstrap interval. It is given for the wall time, and for the CPU time of all processes together,
which counts on a machine that has other work or fewer cores than processes.

Of the kills a donor of three ends itself with SIGKILL in the middle of what it gives; the turn
beside it is one of ours in which nobody dies.
"""

import argparse
import json
import logging
import multiprocessing
import os
import signal
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import torch
from steady import interval

from trainmover.bus.lifeline import die_with
from trainmover.runtime.endpoint import Connection, Endpoint
from trainmover.runtime.raw import CHUNK
from trainmover.runtime.run import SWITCH_INTERVAL_S
from trainmover.runtime.tracked import Tracked
from trainmover.runtime.transfer.donor import serve
from trainmover.runtime.transfer.puller import pull
from trainmover.runtime.transfer.wire import TransferError

SYSTEMS = ("bare", "ours", "again")
WARM_TURNS = 2
LIMIT_S = 120.0
TENSOR_BYTES = 16 << 20
STREAMS = 2
"""Connections to a donor, of the bare copy; ours has as many for states of this size."""
_PART = struct.Struct("!II")  # which part, of how many


# ---- a process


class Process:
    """A donor, or the one that takes."""

    def __init__(self, worker: str, folder: Path, size: int, filled: bool) -> None:
        counts = [TENSOR_BYTES // 4] * (size // TENSOR_BYTES) + [size % TENSOR_BYTES // 4]
        tensors = [torch.full((n,), float(i + 1) * filled) for i, n in enumerate(counts)]
        self._bytes = [memoryview(t.numpy()).cast("B") for t in tensors]
        self._tracked = Tracked()
        self._tracked.add(model=torch.nn.ParameterList(tensors))
        self._generation = 0
        self._reads_left: int | None = None
        self._bare: dict[tuple[str, ...], list[socket.socket]] = {}
        self._cpu_s = 0.0
        self.endpoint = Endpoint("bench", worker, "m0", b"secret", folder)
        self.endpoint.serve("state", self._serve)
        self.endpoint.serve("bare", self._serve_bare)

    def addresses(self) -> tuple[str, ...]:
        return self.endpoint.addresses

    def cpu_s(self) -> float:
        """Since it was asked for the last time."""
        before, self._cpu_s = self._cpu_s, time.process_time()
        return self._cpu_s - before

    # -- a donor

    def die_after(self, reads: int) -> None:
        self._reads_left = reads

    def _allowed(self) -> bool:
        if self._reads_left is not None:
            self._reads_left -= 1
            if self._reads_left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return True

    def _serve(self, connection: Connection) -> None:
        offer = partial(self._tracked.offers.get, connection.generation)
        with suppress(TransferError, OSError):
            serve(connection.sock, offer, deadline_s=LIMIT_S, allowed=self._allowed)
        connection.close()

    def _serve_bare(self, connection: Connection) -> None:
        with connection.sock as sock:
            while asked := sock.recv(_PART.size, socket.MSG_WAITALL):
                for piece in self._pieces(*_PART.unpack(asked)):
                    sock.sendall(piece)

    def _pieces(self, part: int, parts: int) -> Iterator[memoryview]:
        """Of one part of the state, those that are not larger than a chunk of ours."""
        for whole in self._bytes:
            first, last = (n * len(whole) // parts // 4 * 4 for n in (part, part + 1))
            for at in range(first, last, CHUNK):
                yield whole[at : min(at + CHUNK, last)]

    # -- who takes

    def open_bare(self, donors: Mapping[str, tuple[str, ...]]) -> None:
        self._bare[tuple(donors)] = [
            self._dial(worker, addresses, "bare")
            for worker, addresses in donors.items()
            for _ in range(STREAMS)
        ]

    def bare(self, donors: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
        self._forget()
        socks = self._bare[tuple(donors)]

        def take(part: int, sock: socket.socket) -> None:
            sock.sendall(_PART.pack(part, len(socks)))
            for piece in self._pieces(part, len(socks)):
                at = 0
                while at < len(piece):
                    at += sock.recv_into(piece[at:], 0, socket.MSG_WAITALL)

        threads = [threading.Thread(target=take, args=each) for each in enumerate(socks)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._told(time.perf_counter() - began)

    again = bare

    def ours(self, donors: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
        self._forget()
        self._generation += 1
        dials = {w: partial(self._dial, w, addresses, "state") for w, addresses in donors.items()}
        began = time.perf_counter()
        pulled = pull(dials, self._tracked, deadline_s=LIMIT_S)
        wall_s = time.perf_counter() - began
        assert pulled.digest == pulled.donor_digest, pulled
        return self._told(wall_s, pulled.again)

    def _forget(self) -> None:
        for whole in self._bytes:
            whole[:4] = whole[-4:] = bytes(4)
        self.cpu_s()

    def _told(self, wall_s: float, again: int = 0) -> dict[str, Any]:
        cpu_s = self.cpu_s()
        for number, whole in enumerate(self._bytes, 1):
            expected = struct.pack("f", number)
            assert bytes(whole[:4]) == bytes(whole[-4:]) == expected, f"tensor {number}"
        return {"wall_s": wall_s, "cpu_s": cpu_s, "again": again}

    def _dial(self, worker: str, addresses: tuple[str, ...], channel: str) -> socket.socket:
        connection = self.endpoint.dial(addresses, worker, channel, self._generation, LIMIT_S)
        return connection.sock


def serve_orders(worker: str, folder: Path, size: int, filled: bool, pipe: Pipe) -> None:
    die_with(os.getppid())
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    wrapper = structlog.make_filtering_bound_logger(logging.ERROR)  # deaths are wanted here
    structlog.configure(wrapper_class=wrapper)
    process = Process(worker, folder, size, filled)
    while (order := pipe.recv()) is not None:
        pipe.send(getattr(process, order[0])(*order[1:]))
    os._exit(0)


# ---- the bench


class Case(NamedTuple):
    transport: str
    size: int
    donors: int

    @property
    def title(self) -> str:
        return f"{self.transport}, {self.size / 1e6:.0f} MB, {self.donors} donors"


@dataclass(frozen=True)
class Took:
    wall_s: float
    cpu_s: float
    """Of all processes together."""
    again: int = 0
    """Bytes that were asked for twice."""


class Job:
    """The processes of one size."""

    def __init__(self, size: int, folder: Path, stack: ExitStack) -> None:
        self._size, self._folder, self._stack = size, folder, stack
        self._context = multiprocessing.get_context("fork")
        self._pipes: dict[str, Pipe] = {}
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._number = 0
        self.joiner = self._start(filled=False)
        self.donors: list[str] = []

    def with_donors(self, count: int) -> None:
        """So many there are from now on."""
        while len(self.donors) < count:
            self.donors.append(self._start(filled=True))

    def turn(self, system: str, case: Case, killed: int | None = None) -> Took:
        """`killed`: the last donor dies at this of its reads."""
        names = self.donors[: case.donors]
        scheme = f"{case.transport}:"
        donors = {n: tuple(a for a in self._addresses[n] if a.startswith(scheme)) for n in names}
        for name in names:
            self._tell(name, "cpu_s")
        if killed is not None:
            self._tell(names[-1], "die_after", killed)
        took = self._tell(self.joiner, system, donors)
        if killed is not None:
            self.donors.remove(names.pop())
        cpu_s = took["cpu_s"] + sum(self._tell(name, "cpu_s") for name in names)
        return Took(took["wall_s"], cpu_s, took["again"])

    def open_bare(self, case: Case) -> None:
        scheme = f"{case.transport}:"
        names = self.donors[: case.donors]
        donors = {n: tuple(a for a in self._addresses[n] if a.startswith(scheme)) for n in names}
        self._tell(self.joiner, "open_bare", donors)

    def _start(self, *, filled: bool) -> str:
        worker = f"w{self._number}"
        self._number += 1
        self._pipes[worker], theirs = self._context.Pipe()
        arguments = (worker, self._folder, self._size, filled, theirs)
        process = self._context.Process(target=serve_orders, args=arguments)
        process.start()
        theirs.close()
        self._stack.callback(ended, process)
        self._addresses[worker] = self._tell(worker, "addresses")
        return worker

    def _tell(self, worker: str, *order: Any) -> Any:
        self._pipes[worker].send(order)
        if not self._pipes[worker].poll(LIMIT_S):
            raise SystemExit(f"transfer: {worker} did not answer in {LIMIT_S} s: {order[0]}")
        try:
            return self._pipes[worker].recv()
        except EOFError:
            raise SystemExit(f"transfer: {worker} ended early: see its output above") from None


def ended(process: Any) -> None:
    process.kill()
    process.join()


@contextmanager
def started(size: int) -> Iterator[Job]:
    """Processes forked from this one, which has no other thread; ended with the block."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="transfer-"))
        yield Job(size, Path(folder), stack)


def measure(job: Job, case: Case, pairs: int) -> dict[str, list[Took]]:
    """`pairs` turns of each system, there and back, after a few that do not count."""
    job.open_bare(case)
    return in_turns(pairs, {system: partial(job.turn, system, case) for system in SYSTEMS})


def measure_kills(job: Job, case: Case, pairs: int) -> dict[str, list[Took]]:
    """The last donor dies when it has given half of its part; a new one takes its place."""
    reads = case.size // CHUNK // case.donors // 2

    def with_a_kill() -> Took:
        job.with_donors(case.donors)
        return job.turn("ours", case, killed=reads)

    def without() -> Took:
        job.with_donors(case.donors)
        return job.turn("ours", case)

    return in_turns(pairs, {"ours": without, "kill": with_a_kill})


def in_turns(pairs: int, take: Mapping[str, Callable[[], Took]]) -> dict[str, list[Took]]:
    took: dict[str, list[Took]] = {name: [] for name in take}
    order = list(take)
    for _ in range(WARM_TURNS + pairs):
        for name in order:
            took[name].append(take[name]())
        order.reverse()
    return {name: turns[WARM_TURNS:] for name, turns in took.items()}


def shares(base: Sequence[Took], turns: Sequence[Took], what: str) -> tuple[float, float, float]:
    """Throughput of these turns over that of those beside them."""
    pairs = zip(base, turns, strict=True)
    return interval([getattr(b, what) / getattr(t, what) for b, t in pairs])


def report(case: Case, took: Mapping[str, Sequence[Took]]) -> None:
    """The rows of one case."""
    base, *others = took
    for what in ("wall_s", "cpu_s"):
        base_s = statistics.median(getattr(turn, what) for turn in took[base])
        rate = f"{case.size / base_s / 1e9:5.2f} GB/s" if what == "wall_s" else f"{base_s:6.3f} s  "
        row = f"{case.title:<26} {what[:-2]:<4} {base} {rate}"
        for name in others:
            median, low, high = shares(took[base], took[name], what)
            row += f"   {name} {median:5.2f} [{low:.2f}, {high:.2f}]"
        print(row, flush=True)
    if "kill" in took:
        again = [turn.again / 1e6 for turn in took["kill"]]
        more = [
            1e3 * (k.wall_s - o.wall_s) for k, o in zip(took["kill"], took["ours"], strict=True)
        ]
        longer, low, high = interval(more)
        print(
            f"{case.title:<26} kill {longer:.0f} ms longer [{low:.0f}, {high:.0f}]"
            f"   asked for twice: {statistics.median(again):.1f} MB, at most {max(again):.1f}",
            flush=True,
        )


def saved(results: Mapping[tuple[str, Case], Mapping[str, Sequence[Took]]]) -> list[dict[str, Any]]:
    """All cases as JSON has them: every turn."""
    return [
        {
            "what": what,
            **case._asdict(),
            "turns": {name: [asdict(turn) for turn in turns] for name, turns in took.items()},
        }
        for (what, case), took in results.items()
    ]


def parsed(text: str) -> int:
    """Bytes of 100M or 1G, powers of ten, a multiple of 4."""
    number = int(float(text.rstrip("kKmMgG")) * {"M": 1e6, "G": 1e9}.get(text[-1:].upper(), 1))
    if number < 4 * TENSOR_BYTES:
        raise argparse.ArgumentTypeError(f"expected at least {4 * TENSOR_BYTES} bytes, got {text}")
    return number // 4 * 4


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=parsed, nargs="+", default=[parsed("100M"), parsed("1G")],
                        metavar="SIZE", help="bytes of a state (default: 100M 1G)")  # fmt: skip
    parser.add_argument("--donors", type=int, nargs="+", default=[1, 3], help="default: 1 3")
    parser.add_argument(
        *("--transports", "-t"), nargs="+", choices=("unix", "tcp"), default=["unix", "tcp"]
    )
    parser.add_argument("--pairs", type=int, default=20, help="turns of each system (default 20)")
    parser.add_argument("--kills", type=int, default=10, help="turns with a kill (default 10)")
    parser.add_argument("--out", type=Path, help="folder for transfer.json")
    args = parser.parse_args()
    results: dict[tuple[str, Case], dict[str, list[Took]]] = {}

    def keep(what: str, case: Case, took: dict[str, list[Took]]) -> None:
        results[what, case] = took
        report(case, took)
        if args.out:  # each time: a long run may be cut off
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "transfer.json").write_text(json.dumps(saved(results), indent=1))

    for size in args.sizes:
        with started(size) as job:
            for count in args.donors:
                job.with_donors(count)
                for transport in args.transports:
                    case = Case(transport, size, count)
                    keep("copy", case, measure(job, case, args.pairs))
            most = max(args.donors)
            for transport in args.transports if args.kills and most > 1 else ():
                case = Case(transport, size, most)
                keep("kill", case, measure_kills(job, case, args.kills))
    return 0


if __name__ == "__main__":
    sys.exit(main())
