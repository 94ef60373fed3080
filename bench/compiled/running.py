"""The compared jobs: how each is started, looked at, disturbed and ended."""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from children import Child
from environment import variables
from ledger import Tail
from record import COMMIT, SHADOW, Line, full_steps, holder

HERE = Path(__file__).parent
RANK = 1
"""The one that loses its process."""
MIGRATE_S = 300.0
NOTICE, PROCESSES, GROUPS = "notice", "new processes", "groups and links"
STATE, WARM_UP, FIRST_STEP = "state", "set-up and compiling", "first step"
PHASES = (NOTICE, PROCESSES, GROUPS, STATE, WARM_UP, FIRST_STEP)

Event = dict[str, Any]


class Job(Protocol):
    num_ranks: int

    def ready(self, moves: int) -> bool:
        """Whether that is there which takes over in move number `moves`, from 0."""

    def ended(self) -> str:
        """Empty while it runs, else what became of it."""

    def phases(self, since_s: float, normal_s: float, lines: Sequence[Line]) -> dict[str, float]:
        """Where the time went from `since_s` to the first full step, in seconds; all of PHASES
        that there are. `normal_s`: a normal step."""

    def stop(self) -> None:
        """Ends every process of it. Blocks."""


def kill(lines: Sequence[Line]) -> float:
    """SIGKILL to the process that holds RANK. Returns when, in seconds since 1970."""
    pid, at_s = holder(lines, RANK), time.time()
    os.kill(pid, signal.SIGKILL)
    return at_s


class Promoted:
    """`trainmover run` with one standby."""

    def __init__(
        self,
        folder: Path,
        cache: Path,
        num_ranks: int,
        flags: Sequence[str] = (),
        script: Sequence[str] = (),
    ) -> None:
        self.num_ranks = num_ranks
        self.name = f"--job=bench-{os.getpid()}-{folder.name}"
        self.command = [sys.executable, "-m", "trainmover.cli.main"]
        run = [*self.command, "run", f"--nproc-per-node={num_ranks}", "--standbys=1", self.name]
        kept = [f"--report={folder / 'report.json'}", f"--log-dir={folder / 'logs'}"]
        training = [HERE / "promoted.py", f"--record={folder / 'record'}", *script]
        self.env = {**variables(), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
        self.run = Child([*run, *kept, *flags, *training], self.env, folder / "run.log")
        self.folder, self.warm = folder, "--no-warmup" not in flags
        self.tail = Tail(folder / "events.jsonl")
        self.watch: Child | None = None
        self.events: list[Event] = []

    def ready(self, moves: int) -> bool:
        if self.watch is None:  # steps are done, so the job can be found
            follow = [*self.command, "events", "--follow", "--json", self.name]
            self.watch = Child(follow, self.env, self.folder / "events.jsonl")
        self.events += [json.loads(text) for text in self.tail.new()]
        if self.warm:
            return len({e["worker"] for e in self.of("standby.warmed")}) > moves
        return len(self.of("worker.registered")) > self.num_ranks + moves

    def of(self, what: str) -> list[Event]:
        """The events of a type, so far."""
        return [event for event in self.events if event["type"] == what]

    def ended(self) -> str:
        return self.run.ended() or (self.watch.ended() if self.watch else "")

    def migrate(self) -> None:
        """Blocks until RANK has moved to the standby; MIGRATE_S at most."""
        command = [*self.command, "migrate", self.name, f"--rank={RANK}"]
        child = Child(command, self.env, self.folder / "migrate.log")
        try:
            child.process.wait(MIGRATE_S)
        finally:
            child.stop()

    def phases(self, since_s: float, normal_s: float, lines: Sequence[Line]) -> dict[str, float]:
        """From the events of the move, and from when the joiner was done with its set-up."""
        completed = self.of("migration.completed")[-1]
        generation = completed["generation"]
        joiner = holder(lines, RANK)
        shadows = [x.time_s for x in lines if x.pid == joiner and x.what == SHADOW]

        def last(stage: str) -> float:
            reached = [rank["reached"] for rank in completed["ranks"]]
            return max((float(each[stage]) for each in reached if stage in each), default=0.0)

        planned = next(
            e["time_s"] for e in self.of("migration.planned") if e["generation"] == generation
        )
        began_s = last("frozen") or planned
        return spans(
            since_s,
            (NOTICE, began_s),
            (WARM_UP, max(shadows, default=since_s)),
            (STATE, last("restored")),
            (GROUPS, last("resumed")),
            (FIRST_STEP, first_full_s(lines, since_s, joiner, self.num_ranks)),
        )

    def joined(self) -> Event:
        """What the worker that took over last says of itself."""
        return next(e for e in reversed(self.of("rank.ready")) if e["generation"] > 1)

    def stop(self) -> None:
        self.run.stop()
        if self.watch:
            self.watch.stop()


class Relaunched:
    """torchrun: all ranks end, start again and load a checkpoint of the last step."""

    def __init__(self, folder: Path, cache: Path, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.memory = Path(tempfile.mkdtemp(prefix="breakdown-", dir="/dev/shm"))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        limits = [f"--nproc-per-node={num_ranks}", "--max-restarts=1000"]
        kept = [f"--record={folder / 'record'}", f"--checkpoint={self.memory / 'checkpoint.pt'}"]
        script = [HERE / "relaunched.py", *kept, f"--new-machine={RANK}"]
        # Else the restarted ranks find addresses of the dead ones in the store that the launcher
        # keeps for all attempts, and never meet (issue 135712 of PyTorch).
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
        self.run = Child([*launcher, *limits, *script], {**variables(), **own}, folder / "run.log")

    def ready(self, moves: int) -> bool:
        return True

    def ended(self) -> str:
        return self.run.ended()

    def phases(self, since_s: float, normal_s: float, lines: Sequence[Line]) -> dict[str, float]:
        """Each until the last rank was there. What the first step takes beyond a normal one is
        compiling."""

        def last(what: str) -> float:
            return max(x.time_s for x in lines if x.what == what)

        end_s = first_full_s(lines, since_s, holder(lines, RANK), self.num_ranks)
        found = spans(
            since_s,
            (NOTICE, last("started")),
            (PROCESSES, last("imported")),
            (GROUPS, last("joined")),
            (WARM_UP, last("made")),
            (STATE, last("loaded")),
            (FIRST_STEP, end_s),
        )
        compiling_s = max(0.0, found[FIRST_STEP] - normal_s)
        found[WARM_UP] += compiling_s
        found[FIRST_STEP] -= compiling_s
        return found

    def stop(self) -> None:
        self.run.stop()
        shutil.rmtree(self.memory)


def spans(since_s: float, *moments: tuple[str, float]) -> dict[str, float]:
    """Phase -> seconds from the moment before to its own; none is negative."""
    found: dict[str, float] = {}
    for phase, at_s in moments:
        found[phase] = max(0.0, at_s - since_s)
        since_s = max(since_s, at_s)
    return found


def first_full_s(lines: Sequence[Line], since_s: float, joiner: int, num_ranks: int) -> float:
    """When all ranks had committed the first step of process `joiner`."""
    first = min(x.step for x in lines if x.what == COMMIT and x.pid == joiner)
    return dict(full_steps((x for x in lines if x.time_s > since_s), num_ranks))[first]
