"""How fast our collectives are: all_reduce through our process group beside gloo, in turns.

    python bench/collectives.py --out /tmp/collectives
    python bench/collectives.py --ranks 4 --sizes 5.2M --pairs 20     # one case, quickly

For each number of ranks, processes are started that each hold four groups of the same members:
ours within a machine (Unix sockets and shared memory), ours between machines (TCP), gloo, and
gloo again, since only a second copy of the rival shows what a ratio of equals looks like here.
The groups take turns of a few all_reduces each, issued as DDP issues them (asynchronously, then
waited for); who waits holds still. Every rank reports the wall time of its turn and the CPU time
of its whole process. A ratio is the median over pairs of neighbouring turns, with its 95 %
bootstrap interval: below 1 we are faster. With more ranks than cores wall time is mostly waiting
for a core, so there the CPU time decides.

`bound` marks the cases of a training thread that runs pure Python until its call is complete,
and so holds the interpreter's lock (docs/design/groups.md).
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from steady import interval

HERE = Path(__file__).resolve()
SYSTEMS = ("gloo", "ours", "tcp", "again")
NAMES = {"ours": "ours, one machine", "tcp": "ours, TCP", "again": "gloo again"}
COLORS = {"ours": "#15803d", "tcp": "#2563eb", "again": "#94a3b8"}
LANES = {"ours": 0.22, "tcp": 0.0, "again": -0.22}
WHAT = ("wall_s", "cpu_s")
BOUND_BYTES = 64 << 10
"""A python-bound case is for messages up to here: what a large one costs is its bytes."""
START_S, TURN_S, END_S = 120.0, 120.0, 30.0
TURN_BYTES, MOST_CALLS = 24 << 20, 40
"""A turn moves about so many bytes, in at most so many calls."""
WARM_TURNS = 2


# ---- a rank


def rank_main(rank: int, size: int, folder: str) -> None:
    """Serves turns until the bench closes the connection."""
    import torch
    from torch._C._distributed_c10d import AllreduceOptions

    from trainmover.runtime.run import SWITCH_INTERVAL_S

    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    groups, close = connect(rank, size, Path(folder))
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(Path(folder, "bench")))
    lines = sock.makefile("rw")

    def say(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=lines, flush=True)

    say({"rank": rank})
    values: dict[int, torch.Tensor] = {}
    options = AllreduceOptions()
    for line in lines:
        turn = json.loads(line)
        count = turn["bytes"] // 4
        if count not in values:
            values[count] = torch.zeros(count)
        tensors, group = [values[count]], groups[turn["system"]]
        group.allreduce(tensors, options).wait()  # all ranks are here
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(turn["calls"]):
            work = group.allreduce(tensors, options)
            while turn["bound"] and not work.is_completed():
                sum(range(100))
            work.wait()
        say({"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu})
    close()


def connect(rank: int, size: int, folder: Path) -> tuple[dict[str, Any], Callable[[], None]]:
    """The groups of this rank, by system, and what closes them."""
    import torch.distributed as dist

    from trainmover.runtime.admission import Admission
    from trainmover.runtime.endpoint import Endpoint
    from trainmover.runtime.engine import LinkEngine, Wiring
    from trainmover.runtime.fence import Fence
    from trainmover.runtime.groups import LinkGroup
    from trainmover.runtime.mesh import Mesh
    from trainmover.runtime.topology import Assignment, ring_edges

    limit = timedelta(seconds=START_S)
    store = dist.FileStore(str(folder / "store"), size)
    endpoint = Endpoint("bench", f"w{rank}", "m0", b"secret", folder)
    store.set(f"addresses/{rank}", json.dumps(endpoint.addresses))
    workers = {r: f"w{r}" for r in range(size)}
    addresses = {w: json.loads(store.get(f"addresses/{r}")) for r, w in workers.items()}
    fence = Fence()
    groups: dict[str, Any] = {}
    for system, scheme in (("ours", "unix:"), ("tcp", "tcp:")):
        mesh = Mesh(endpoint, fence, share_memory=True)
        mesh.register(system, ring_edges(range(size)))
        some = {w: tuple(a for a in each if a.startswith(scheme)) for w, each in addresses.items()}
        mesh.switch(Assignment(1, rank, workers, some, range(size)), START_S)

        def broken(*facts: object) -> None:
            raise SystemExit(f"collectives: a link broke: {facts}")

        wiring = Wiring(mesh, fence, Admission(), lambda issued: None, broken)
        groups[system] = LinkGroup(LinkEngine(wiring, system, range(size), rank))
    fence.open(1)
    for system in ("gloo", "again"):
        prefix = dist.PrefixStore(system, store)
        groups[system] = dist.ProcessGroupGloo(prefix, rank, size, limit)

    def close() -> None:
        fence.revoke(1, "the bench is over")
        for system in ("ours", "tcp"):
            groups[system].engine.close(END_S)
        endpoint.close()

    return groups, close


# ---- the bench


class Case(NamedTuple):
    """One row group of the table."""

    ranks: int
    bytes: int
    bound: bool = False
    """Whether the training thread runs pure Python while it waits."""

    @property
    def title(self) -> str:
        at = f"{self.ranks} ranks, {shown(self.bytes)}"
        return f"{at}, bound" if self.bound else at

    @property
    def counts(self) -> str:
        """The time that decides: with more ranks than cores, wall time is waiting for a core."""
        return "wall_s" if self.bound or self.ranks <= (os.cpu_count() or 1) else "cpu_s"


@dataclass(frozen=True)
class Took:
    """One turn: seconds a call."""

    wall_s: float
    """Of the slowest rank."""
    cpu_s: float
    """Of all ranks together, per rank."""


class Ranks:
    """The processes of one group size, connected and waiting for a turn."""

    def __init__(self, socks: Sequence[socket.socket]) -> None:
        self._files = [sock.makefile("rw") for sock in socks]

    def turn(self, system: str, case: Case) -> Took:
        """All ranks make the calls of one turn; blocks until they have."""
        calls = max(1, min(MOST_CALLS, TURN_BYTES // case.bytes) // max(1, case.ranks // 2))
        order = {"system": system, "bytes": case.bytes, "calls": calls, "bound": case.bound}
        for file in self._files:
            print(json.dumps(order), file=file, flush=True)
        took = [self._answer(file) for file in self._files]
        wall_s = max(t["wall_s"] for t in took) / calls
        return Took(wall_s, statistics.mean(t["cpu_s"] for t in took) / calls)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _answer(self, file: Any) -> dict[str, float]:
        line = file.readline()
        if not line:
            raise SystemExit("collectives: a rank ended early: see its output above")
        answer: dict[str, float] = json.loads(line)
        return answer


@contextmanager
def started(size: int) -> Iterator[Ranks]:
    """`size` ranks, connected to each other and to us; ended with the block."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="collectives-"))
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(str(Path(folder, "bench")))
        server.listen(size)
        server.settimeout(START_S)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        processes = []
        for rank in range(size):
            command = [sys.executable, str(HERE), "rank", str(rank), str(size), folder]
            processes.append(subprocess.Popen(command, env=environment))
            stack.callback(ended, processes[-1])
        found: dict[int, socket.socket] = {}
        while len(found) < size:
            try:
                sock, _ = server.accept()
            except TimeoutError:
                raise SystemExit("collectives: not all ranks came: see their output") from None
            sock.settimeout(TURN_S)
            stack.enter_context(sock)
            found[json.loads(sock.makefile("r").readline())["rank"]] = sock
        ranks = Ranks([found[rank] for rank in range(size)])
        yield ranks
        ranks.close()
        for sock in found.values():
            sock.shutdown(socket.SHUT_RDWR)


def ended(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def measure(ranks: Ranks, case: Case, pairs: int) -> dict[str, list[Took]]:
    """`pairs` turns of each system, there and back, after a few that do not count."""
    took: dict[str, list[Took]] = {system: [] for system in SYSTEMS}
    order = list(SYSTEMS)
    for _ in range(WARM_TURNS + pairs):
        for system in order:
            took[system].append(ranks.turn(system, case))
        order.reverse()
    return {system: turns[WARM_TURNS:] for system, turns in took.items()}


def ratios(took: dict[str, list[Took]], what: str) -> dict[str, tuple[float, float, float]]:
    """Each system over gloo: median and its interval."""
    base = [getattr(turn, what) for turn in took["gloo"]]
    return {
        system: interval([getattr(t, what) / b for t, b in zip(turns, base, strict=True)])
        for system, turns in took.items()
        if system != "gloo"
    }


def report(case: Case, took: dict[str, list[Took]]) -> None:
    """The rows of one case."""
    for what in WHAT:
        gloo_s = statistics.median(getattr(turn, what) for turn in took["gloo"])
        row = f"{case.title:<28} {what[:-2]:<4} {gloo_s * 1e6:8.0f} us"
        for median, low, high in ratios(took, what).values():
            row += f"   {median:5.3f} [{low:.3f}, {high:.3f}]"
        print(row, flush=True)


def draw(results: dict[Case, dict[str, list[Took]]], path: Path) -> None:
    """The ratio that counts of each case, as a dot with its interval, beside the line of equals."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("collectives: no picture: pip install 'trainmover[plots]'", file=sys.stderr)
        return
    figure, axes = plt.subplots(figsize=(8, 0.6 + 0.42 * len(results)), layout="constrained")
    for row, (case, took) in enumerate(reversed(results.items())):
        for system, (median, low, high) in ratios(took, case.counts).items():
            at = row + LANES[system]
            axes.plot([low, high], [at, at], color=COLORS[system], linewidth=3)
            label = NAMES[system] if row == 0 else None
            axes.plot([median], [at], "o", color=COLORS[system], markersize=5, label=label)
    titles = [f"{case.title}, {case.counts[:-2]}" for case in reversed(results)]
    axes.set_yticks(range(len(results)), titles, fontsize=8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel("time of an all_reduce over gloo's; median and 95 % interval")
    axes.legend(loc="upper left", fontsize=7, frameon=False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)


def saved(results: dict[Case, dict[str, list[Took]]]) -> list[dict[str, Any]]:
    """All cases as JSON has them: ratios, and seconds a call of every turn."""
    return [
        {
            **case._asdict(),
            "ratios": {what: ratios(took, what) for what in WHAT},
            "turns": {system: [vars(turn) for turn in turns] for system, turns in took.items()},
        }
        for case, took in results.items()
    ]


def shown(size: int) -> str:
    """Bytes in words: 65536 is 64 KiB."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} B"


def parsed(text: str) -> int:
    """Bytes of 64K, 1M or 5.2M, a multiple of 4."""
    factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper(), 1)
    number = float(text.rstrip("kKmM")) * factor
    if number < 4:
        raise argparse.ArgumentTypeError(f"expected at least 4 bytes, got {text}")
    return int(number) // 4 * 4


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        *("--ranks", "-n"), type=int, nargs="+", default=[2, 4, 8], help="default: 2 4 8"
    )
    parser.add_argument(
        *("--sizes", "-s"),
        type=parsed,
        nargs="+",
        metavar="SIZE",
        default=[parsed(size) for size in ("4K", "64K", "1M", "16M")],
        help="bytes of a message, such as 5.2M (default: 4K 64K 1M 16M)",
    )
    parser.add_argument("--pairs", type=int, default=40, help="turns of each system (default 40)")
    parser.add_argument(
        "--bound", action="store_true", help="only the cases with a python-bound training thread"
    )
    parser.add_argument("--out", type=Path, help="folder for collectives.json and collectives.png")
    args = parser.parse_args()
    results: dict[Case, dict[str, list[Took]]] = {}
    titles = "".join(f"   {NAMES[system]:<20}" for system in SYSTEMS[1:])
    print(f"{'over gloo':<28} {'':<4} {'gloo':>11}{titles}", flush=True)
    for size in args.ranks:
        print(f"collectives: starting {size} ranks", file=sys.stderr, flush=True)
        with started(size) as ranks:
            cases = [Case(size, each, args.bound) for each in args.sizes]
            if not args.bound:
                cases += [Case(size, each, True) for each in args.sizes if each <= BOUND_BYTES]
            for case in cases:
                results[case] = measure(ranks, case, args.pairs)
                report(case, results[case])
                if args.out:  # each time: a long run may be cut off
                    args.out.mkdir(parents=True, exist_ok=True)
                    text = json.dumps(saved(results), indent=1)
                    (args.out / "collectives.json").write_text(text)
    if args.out:
        draw(results, args.out / "collectives.png")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank_main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        sys.exit(main())
