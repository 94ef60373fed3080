"""What protection costs while nothing fails: our step beside plain DDP on gloo, in turns.

    python bench/steady.py --out /tmp/steady

Three jobs of four ranks train the same model (1.3 M parameters) at the same time: ours under
`trainmover run` with a standby, and plain DistributedDataParallel on gloo twice, since only a
second copy of the rival shows what a ratio of equals looks like here (the A/A row). They take
turns of a few steps each; who waits holds still. Of each turn every rank reports its wall time
and the CPU time of its whole process. A ratio is the median over pairs of neighbouring turns,
with its 95 % bootstrap interval. Wall time on a machine with fewer cores than ranks is waiting
for a core, so the CPU time decides.
"""

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve()
RANKS = 4
START_S, TURN_S, END_S = 120.0, 120.0, 30.0
WARM_TURNS = 3
ENV = "TRAINMOVER_BENCH_TURNS"


# ---- a rank


class Turns:
    """The rank's side of the socket on which the bench gives turns."""

    def __init__(self, system: str, rank: int) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.connect(os.environ[ENV])
        self._sock.settimeout(START_S + TURN_S)
        self._lines = self._sock.makefile("r")
        self._say({"system": system, "rank": rank})

    def steps(self) -> int:
        """Blocks until it is our turn; how many steps it has, 0: the end."""
        return int(self._lines.readline() or 0)

    def took(self, wall_s: float, cpu_s: float) -> None:
        self._say({"wall_s": wall_s, "cpu_s": cpu_s})

    def _say(self, what: dict[str, object]) -> None:
        self._sock.sendall(json.dumps(what).encode() + b"\n")


def in_turns(turns: Turns, one_step: Callable[[], None]) -> None:
    while count := turns.steps():
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            one_step()
        turns.took(time.perf_counter() - wall, time.process_time() - cpu)


def gloo() -> None:
    """Plain DDP, as torch's documentation has it."""
    import torch
    import torch.distributed as dist
    from model import Training, endless

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    training = Training(dist.get_rank(), dist.get_world_size(), None, endless)
    in_turns(Turns(sys.argv[2], dist.get_rank()), training.step)
    dist.destroy_process_group()


def ours() -> None:
    from model import Training

    import trainmover

    def train(ctx: trainmover.Context) -> None:
        training = Training(ctx.rank, ctx.world_size, ctx.group("dp"), ctx.batches)
        ctx.track(model=training.model, optimizer=training.optimizer, scheduler=training.scheduler)
        turns: Turns | None = None
        left, wall, cpu = 0, 0.0, 0.0
        for step in ctx.steps(1_000_000):
            if not ctx.shadow:
                turns = turns or Turns("ours", ctx.rank)
                if left == 0:
                    left = turns.steps()
                    wall, cpu = time.perf_counter(), time.process_time()
                    if left == 0:
                        step.stop()
                left -= 1
            with step:
                step.report(loss=training.step())
            if turns is not None and left == 0:
                turns.took(time.perf_counter() - wall, time.process_time() - cpu)

    trainmover.run(train)


# ---- the bench


@dataclass
class Job:
    """One system's four ranks, connected and waiting for their turn."""

    name: str
    process: subprocess.Popen[bytes]
    ranks: list[socket.socket]
    wall_s: list[float] = field(default_factory=list)
    """Per turn: seconds a step, of the slowest rank."""
    cpu_s: list[float] = field(default_factory=list)
    """Per turn: CPU seconds a step, of all ranks together."""

    def turn(self, steps: int) -> None:
        for sock in self.ranks:
            sock.sendall(f"{steps}\n".encode())
        took = [json.loads(_line(sock, self)) for sock in self.ranks]
        self.wall_s.append(max(t["wall_s"] for t in took) / steps)
        self.cpu_s.append(sum(t["cpu_s"] for t in took) / steps)


def _line(sock: socket.socket, job: Job) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        piece = sock.recv(4096)
        if not piece:
            raise SystemExit(f"steady: a rank of {job.name} ended early: see its output above")
        line += piece
    return line


@contextmanager
def started(name: str, command: list[str], server: socket.socket) -> Iterator[Job]:
    """The job `name`, its ranks connected; ended with the block."""
    log = Path(tempfile.gettempdir()) / f"steady-{os.getpid()}-{name}.log"
    environment = {
        **os.environ,
        ENV: server.getsockname(),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(HERE.parent),
    }
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    try:
        server.settimeout(START_S)
        found: dict[int, socket.socket] = {}
        while len(found) < RANKS:
            try:
                sock, _ = server.accept()
            except TimeoutError:
                raise SystemExit(f"steady: {name} did not start: see {log}") from None
            sock.settimeout(TURN_S)
            found[json.loads(sock.makefile("r").readline())["rank"]] = sock
        yield Job(name, process, [found[rank] for rank in range(RANKS)])
        for sock in found.values():
            sock.sendall(b"0\n")
        process.wait(END_S)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
        log.unlink(missing_ok=True)


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Median and its 95 % bootstrap interval."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return statistics.median(ratios), medians[50], medians[-51]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=60, help="turns of each system (default 60)")
    parser.add_argument("--steps", type=int, default=10, help="steps a turn (default 10)")
    parser.add_argument("--out", type=Path, help="folder for steady.json and steady.png")
    args = parser.parse_args()
    ours_command = [
        *(sys.executable, "-m", "trainmover.cli.main", "run"),
        *(f"--nproc-per-node={RANKS}", "--standbys=1", f"--job=steady-{os.getpid()}"),
        *(str(HERE), "ours"),
    ]

    def rival(name: str) -> list[str]:
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={RANKS}", str(HERE), "gloo", name),
        ]

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="steady-"))
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(str(Path(folder, "turns")))
        server.listen(3 * RANKS)
        jobs = {}
        for name, command in (
            ("gloo", rival("gloo")),
            ("again", rival("again")),
            ("ours", ours_command),
        ):
            print(f"steady: starting {name}", file=sys.stderr, flush=True)
            jobs[name] = stack.enter_context(started(name, command, server))
        order = ["gloo", "ours", "again"]
        for turn in range(-WARM_TURNS, args.pairs):
            if turn == 0:
                for job in jobs.values():
                    job.wall_s.clear()
                    job.cpu_s.clear()
            for name in order:
                jobs[name].turn(args.steps)
            order.reverse()
            if turn % 10 == 0:
                print(f"steady: turn {turn} of {args.pairs}", file=sys.stderr, flush=True)
    rows = {}
    for what in ("cpu_s", "wall_s"):
        base = getattr(jobs["gloo"], what)
        for name in ("ours", "again"):
            ratios = [a / b for a, b in zip(getattr(jobs[name], what), base, strict=True)]
            rows[f"{name} {what}"] = interval(ratios)
    show(jobs, rows)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        raw = {name: {"wall_s": job.wall_s, "cpu_s": job.cpu_s} for name, job in jobs.items()}
        (args.out / "steady.json").write_text(json.dumps({"ratios": rows, "turns": raw}, indent=1))
        draw(rows, args.out / "steady.png")
    return 0


def title(label: str) -> str:
    name, what = label.split()
    return f"{'ours' if name == 'ours' else 'gloo again'} / gloo, {what[:-2]} time"


def draw(rows: dict[str, tuple[float, float, float]], path: Path) -> None:
    """Each ratio as a dot with its interval, beside the line of equals."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("steady: no picture: pip install 'trainmover[plots]'", file=sys.stderr)
        return
    figure, axes = plt.subplots(figsize=(7, 2.4), layout="constrained")
    for at, (label, (median, low, high)) in enumerate(reversed(rows.items())):
        color = "#15803d" if label.startswith("ours") else "#94a3b8"
        axes.plot([low, high], [at, at], color=color, linewidth=4, solid_capstyle="round")
        axes.plot([median], [at], "o", color=color, markersize=9)
        axes.annotate(
            f"{median:.3f}  [{low:.3f}, {high:.3f}]", (median, at + 0.22), ha="center", fontsize=8
        )
    axes.set_yticks(range(len(rows)), [title(label) for label in reversed(rows)])
    axes.set_ylim(-0.5, len(rows) - 0.2)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel("ratio of a step; median and 95 % interval")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)


def show(jobs: dict[str, Job], rows: dict[str, tuple[float, float, float]]) -> None:
    for name, job in jobs.items():
        wall, cpu = statistics.median(job.wall_s), statistics.median(job.cpu_s)
        print(f"{name:<8} {wall * 1e3:7.1f} ms a step, {cpu * 1e3:7.1f} ms of CPU (all ranks)")
    for label, (median, low, high) in rows.items():
        print(f"{title(label):<28} {median:6.3f}  [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    if sys.argv[1:2] == ["gloo"]:
        gloo()
    elif sys.argv[1:2] == ["ours"]:
        ours()
    else:
        sys.exit(main())
