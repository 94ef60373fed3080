"""Replacing one rank: links opened and time in the switch, beside building all groups anew on gloo.

    python bench/switch.py --out /tmp/switch
    python bench/switch.py --sizes 4 --pairs 5         # quickly

N ranks in a layout of two axes (pp=2, dp=N/2) hold three groups each: WORLD, dp and pp, and ours
the control links besides. One more process is warm: it has imported torch and waits. In each turn
a rank is drawn, its process leaves, the warm one takes its place, and the one that left is the
warm one of the next turn. Ours does what a switch does (`Mesh.switch`, links by TCP); gloo
destroys and makes all groups of all ranks under a fresh prefix of the store, as
`torch.distributed` does it, each group by its members alone. The systems take turns in the same
processes, there and back. A turn's time is from the order until the last rank has all its groups,
connected; the CPU time is that of all ranks together. After it an all_reduce in each group shows
that they work.

What was opened is not taken from what the runtime says: before and after, every process lists the
inodes of its sockets. The bench ends with an error unless the joiner has opened exactly its degree
and every other rank exactly its links to the joiner: none, where it is no neighbour.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from steady import interval

from trainmover.bus.lifeline import die_with
from trainmover.runtime.admission import Admission
from trainmover.runtime.endpoint import Endpoint
from trainmover.runtime.engine import LinkEngine, Wiring
from trainmover.runtime.fence import Fence
from trainmover.runtime.groups import LinkGroup
from trainmover.runtime.mesh import Mesh
from trainmover.runtime.topology import Assignment, Edge, control_edges, peers, ring_edges

SIZES = (4, 8, 16, 32)
SYSTEMS = ("ours", "gloo")
PAIRS = {4: 40, 8: 40, 16: 20, 32: 12}
WARM_TURNS = 2
LIMIT_S = 120.0
MACHINE = 4
"""Ranks of a machine, for the choice of buddies; all processes are on this one."""


# ---- the layout


def groups_of(rank: int, size: int) -> list[list[int]]:
    """WORLD, dp and pp of a rank, where pp=2 is the outer axis."""
    half = size // 2
    first = rank // half * half
    return [list(range(size)), list(range(first, first + half)), [rank % half, rank % half + half]]


def channels_of(rank: int, size: int) -> dict[str, frozenset[Edge]]:
    """What a rank registers, by name: its groups' rings, and the control links."""
    rings = {"-".join(map(str, group)): ring_edges(group) for group in groups_of(rank, size)}
    return {**rings, "control": control_edges([f"m{r // MACHINE}" for r in range(size)])}


def links_between(rank: int, size: int, other: int) -> int:
    """How many links two ranks have with each other."""
    return sum(other in peers(edges, rank) for edges in channels_of(rank, size).values())


# ---- a process


@dataclass(frozen=True)
class Turn:
    """What one rank says of its part."""

    ended: float
    """By time.perf_counter(), which all processes share."""
    cpu_s: float
    opened: int
    """Sockets that were not there before, as the kernel lists them."""
    closed: int


class Process:
    """A worker: a rank of both systems, or the warm one."""

    def __init__(self, worker: str, folder: Path, port: int) -> None:
        self._endpoint = Endpoint("bench", worker, "m0", b"secret", folder)
        self._fence = Fence()
        self._mesh: Mesh | None = None
        self._engines: list[LinkEngine] = []
        self._before: set[str] = set()
        self._store = dist.TCPStore("127.0.0.1", port, is_master=False)

    def addresses(self) -> tuple[str, ...]:
        return tuple(a for a in self._endpoint.addresses if a.startswith("tcp:"))

    def look(self) -> None:
        """Before a switch begins anywhere: the next to come may be dialed at once."""
        self._before = sockets()

    def leave(self) -> None:
        """Both systems' groups are closed; the process stays."""
        self._fence.revoke(self._fence.generation, "this worker leaves")
        for engine in self._engines:
            engine.close(LIMIT_S)
        self._engines.clear()
        if self._mesh is not None:
            self._mesh.close()
            self._mesh = None

    def leave_gloo(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def ours(
        self,
        generation: int,
        rank: int,
        workers: Mapping[int, str],
        addresses: Mapping[str, tuple[str, ...]],
        joiners: Sequence[int],
    ) -> Turn:
        cpu = time.process_time()
        if self._mesh is None:
            self._mesh = self._joined(rank, len(workers))
        self._fence.revoke(self._fence.generation, "a rank is replaced")
        plan = Assignment(generation, rank, workers, addresses, joiners)
        self._mesh.switch(plan, LIMIT_S)
        self._fence.open(generation)
        return self._told(cpu, [LinkGroup(engine) for engine in self._engines])

    def gloo(self, number: int, rank: int, size: int) -> Turn:
        cpu = time.process_time()
        self.leave_gloo()
        limit = timedelta(seconds=LIMIT_S)
        store = dist.PrefixStore(f"{number}", self._store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        groups = [
            dist.new_group(ranks, timeout=limit, use_local_synchronization=True)
            for ranks in groups_of(rank, size)[1:]
        ]
        return self._told(cpu, [dist.group.WORLD, *groups])

    def _told(self, cpu: float, groups: Sequence[Any]) -> Turn:
        ended, cpu_s, after = time.perf_counter(), time.process_time() - cpu, sockets()
        for group in groups:
            value = torch.ones(1)
            group.allreduce([value]).wait()
            assert value.item() == group.size(), f"expected {group.size()}, got {value.item()}"
        return Turn(ended, cpu_s, len(after - self._before), len(self._before - after))

    def _joined(self, rank: int, size: int) -> Mesh:
        mesh = Mesh(self._endpoint, self._fence, share_memory=True)
        wiring = Wiring(mesh, self._fence, Admission(), lambda issued: None, fail)
        for name, edges in channels_of(rank, size).items():
            mesh.register(name, edges)
        for ranks in groups_of(rank, size):
            name = "-".join(map(str, ranks))
            self._engines.append(LinkEngine(wiring, name, ranks, ranks.index(rank)))
        return mesh


def fail(*facts: object) -> None:
    raise SystemExit(f"switch: a link broke: {facts}")


def sockets() -> set[str]:
    """Inodes of this process's sockets."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {name for name in found if name.startswith("socket:")}


def serve(worker: str, folder: Path, port: int, pipe: Pipe) -> None:
    die_with(os.getppid())
    torch.set_num_threads(1)
    process = Process(worker, folder, port)
    while (order := pipe.recv()) is not None:
        pipe.send(getattr(process, order[0])(*order[1:]))
    os._exit(0)  # nothing of gloo is worth waiting for


# ---- the bench


@dataclass(frozen=True)
class Took:
    """One replacement."""

    wall_s: float
    cpu_s: float
    joiner: int
    """Sockets that the joiner opened."""
    beside: int
    """Sockets that the other ranks opened, all together."""
    touched: int
    """Ranks, without the joiner, that opened or closed one."""


class Job:
    """The processes of one size."""

    def __init__(self, size: int, pipes: Mapping[str, Pipe]) -> None:
        self.size, self._pipes = size, pipes
        names = list(pipes)
        self.workers = dict(enumerate(names[:size]))
        self.warm = names[size]
        self._number = 0
        self._addresses = self._tell({name: ("addresses",) for name in names})
        for system in SYSTEMS:
            self._switch(system, self.workers, range(size))

    def replace(self, rank: int, order: Sequence[str]) -> dict[str, Took]:
        """The warm process takes the rank in each system, and who had it is the warm one."""
        left, self.workers[rank] = self.workers[rank], self.warm
        self.warm = left
        took = {}
        for system in order:
            self._tell({left: ("leave" if system == "ours" else "leave_gloo",)})
            took[system] = self._switch(system, self.workers, [rank])
        return took

    def _switch(self, system: str, workers: Mapping[int, str], joiners: Sequence[int]) -> Took:
        self._number += 1
        orders: dict[str, tuple[Any, ...]] = {}
        for rank, worker in workers.items():
            plan = (workers, self._addresses, joiners) if system == "ours" else (self.size,)
            orders[worker] = (system, self._number, rank, *plan)
        self._tell({worker: ("look",) for worker in orders})
        began = time.perf_counter()
        turns = self._tell(orders)
        joiner, others = joiners[0], {r: turns[w] for r, w in workers.items() if r != joiners[0]}
        if system == "ours" and len(joiners) == 1:
            self._assert_moved_with(joiner, turns[workers[joiner]], others)
        return Took(
            max(turn.ended for turn in turns.values()) - began,
            sum(turn.cpu_s for turn in turns.values()),
            turns[workers[joiner]].opened,
            sum(turn.opened for turn in others.values()),
            sum(turn.opened + turn.closed > 0 for turn in others.values()),
        )

    def _assert_moved_with(self, joiner: int, its: Turn, others: Mapping[int, Turn]) -> None:
        links = {rank: links_between(rank, self.size, joiner) for rank in others}
        for rank, turn in others.items():
            if (turn.opened, turn.closed) != (links[rank], links[rank]):
                raise SystemExit(
                    f"switch: rank {rank} of {self.size} has {links[rank]} links to rank {joiner}, "
                    f"but opened {turn.opened} and closed {turn.closed}"
                )
        if its.opened != sum(links.values()):
            raise SystemExit(f"switch: the joiner opened {its.opened}, has {sum(links.values())}")

    def _tell(self, orders: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        for worker, order in orders.items():
            self._pipes[worker].send(order)
        answers = {}
        for worker in orders:
            if not self._pipes[worker].poll(LIMIT_S):
                raise SystemExit(
                    f"switch: {worker} did not answer in {LIMIT_S} s: {orders[worker]}"
                )
            try:
                answers[worker] = self._pipes[worker].recv()
            except EOFError:
                raise SystemExit(f"switch: {worker} ended early: see its output above") from None
        return answers


@contextmanager
def started(size: int) -> Iterator[Job]:
    """A job of `size` ranks and one warm process, forked from this one, which has imported torch
    and has no other thread; ended with the block."""
    context = multiprocessing.get_context("fork")
    store_at = free_port()
    pipes: dict[str, Pipe] = {}
    processes = []
    with tempfile.TemporaryDirectory(prefix="switch-") as folder:
        server = context.Process(target=keep_store, args=(store_at,))
        server.start()
        processes.append(server)
        for worker in [f"w{i}" for i in range(size + 1)]:
            pipes[worker], theirs = context.Pipe()
            arguments = (worker, Path(folder), store_at, theirs)
            processes.append(context.Process(target=serve, args=arguments))
            processes[-1].start()
            theirs.close()
        try:
            yield Job(size, pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def keep_store(port: int) -> None:
    """The store of gloo, in a process of its own: a thread here would be in the way of forks."""
    die_with(os.getppid())
    _store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    signal.pause()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def measure(size: int, pairs: int) -> dict[str, list[Took]]:
    """`pairs` replacements in each system, after a few that do not count."""
    draw = random.Random(size)
    took: dict[str, list[Took]] = {system: [] for system in SYSTEMS}
    order = list(SYSTEMS)
    with started(size) as job:
        for _ in range(WARM_TURNS + pairs):
            for system, one in job.replace(draw.randrange(size), order).items():
                took[system].append(one)
            order.reverse()
    return {system: turns[WARM_TURNS:] for system, turns in took.items()}


def of(took: Sequence[Took], what: str) -> list[float]:
    return [getattr(one, what) for one in took]


def span(values: Sequence[float]) -> str:
    least, most = min(values), max(values)
    return f"{least:.0f}" if least == most else f"{least:.0f}-{most:.0f}"


def ratios(took: Mapping[str, Sequence[Took]], what: str) -> tuple[float, float, float]:
    """Gloo over ours: median of the pairs, and its interval."""
    pairs = zip(of(took["gloo"], what), of(took["ours"], what), strict=True)
    return interval([gloo / ours for gloo, ours in pairs])


def report(size: int, took: Mapping[str, Sequence[Took]]) -> None:
    """The rows of one size."""
    for system, turns in took.items():
        wall, low, high = (1e3 * value for value in interval(of(turns, "wall_s")))
        cpu = 1e3 * statistics.median(of(turns, "cpu_s"))
        print(
            f"{size:>3} ranks  {system:<5} {wall:8.1f} ms [{low:.1f}, {high:.1f}]"
            f"  CPU {cpu:8.1f} ms"
            f"  sockets opened: joiner {span(of(turns, 'joiner'))}"
            f", others together {span(of(turns, 'beside'))}"
            f"; other ranks touched {span(of(turns, 'touched'))}"
        )
    for what in ("wall_s", "cpu_s"):
        median, low, high = ratios(took, what)
        print(f"{size:>3} ranks  gloo / ours, {what[:-2]:<4} {median:7.1f} [{low:.1f}, {high:.1f}]")
    sys.stdout.flush()


def draw(sizes: Mapping[int, Mapping[str, Sequence[Took]]], path: Path) -> None:
    """Time and sockets over the number of ranks."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("switch: no picture: pip install 'trainmover[plots]'", file=sys.stderr)
        return
    figure, (times, opened) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for system, color in (("ours", "#15803d"), ("gloo", "#94a3b8")):
        spans = [interval([1e3 * s for s in of(took[system], "wall_s")]) for took in sizes.values()]
        medians = [median for median, _, _ in spans]
        below = [median - low for median, low, _ in spans]
        above = [high - median for median, _, high in spans]
        name = "ours" if system == "ours" else "gloo, all groups anew"
        style: dict[str, Any] = {"color": color, "marker": "o", "linewidth": 2}
        times.errorbar(list(sizes), medians, yerr=[below, above], capsize=3, label=name, **style)
        ends = [
            statistics.median(one.joiner + one.beside for one in took[system])
            for took in sizes.values()
        ]
        opened.plot(list(sizes), ends, **style)
        for axes, values in ((times, medians), (opened, ends)):
            for size, value in zip(sizes, values, strict=True):
                at = {"textcoords": "offset points", "xytext": (-5, 5), "ha": "right"}
                axes.annotate(f"{value:.0f}", (size, value), fontsize=8, **at)
    times.set_ylabel("ms until all groups are there\n(median, 95 % interval)")
    opened.set_ylabel("sockets opened in the whole job")
    times.legend(frameon=False, loc="upper left")
    for axes in (times, opened):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(list(sizes), [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel("ranks")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.margins(x=0.1)
        low, high = axes.get_ylim()
        axes.set_ylim(10 ** math.floor(math.log10(low)), high * 1.6)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="N",
                        help="numbers of ranks, even (default 4 8 16 32)")  # fmt: skip
    parser.add_argument("--pairs", type=int, help="replacements (default 40, 40, 20, 12)")
    parser.add_argument("--out", type=Path, help="folder for switch.json and switch.png")
    args = parser.parse_args()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    found: dict[int, dict[str, list[Took]]] = {}
    for size in args.sizes:
        print(f"switch: {size} ranks", file=sys.stderr, flush=True)
        found[size] = measure(size, args.pairs or PAIRS.get(size, 12))
        report(size, found[size])
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        raw = {
            size: {system: [asdict(one) for one in turns] for system, turns in took.items()}
            for size, took in found.items()
        }
        (args.out / "switch.json").write_text(json.dumps(raw, indent=1))
        draw(found, args.out / "switch.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
