"""Warm-ups of a standby for three role classes beside the ranks that train, and what a recording
leaves behind."""

import math
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from findings import Beside
from jobs import Migrated
from ledger import COMMIT, RANKS, Line
from measure import SETTLE_S, DidNot
from moving import Moves
from parts import SETTLES_S, started, steps, until
from vocabulary import vocabulary

CLASSES = 3
SET_UP = 4
"""So often the vocabulary is counted in a set-up: a second, more or less."""
TURN = 3000 * RANKS
"""Lines that are more than those of a turn."""
PAIR = (1, 2)
"""Ranks of one role class. One of them records."""
WINDOW = 25
"""Steps over which the two are compared."""


@dataclass(frozen=True, slots=True)
class WarmUp:
    """A standby took the place of one that was killed. Seconds; `*_at_s` since 1970."""

    began_at_s: float
    """Its first run of `train`."""
    ended_at_s: float
    """It is warm for the last role class."""
    until_warm_s: float
    """Since the kill: a new process, its turn and the warm-up."""
    cpu_s: float
    """Of its process until then, all threads."""
    classes: Mapping[str, float]
    """What each of the runs of `train` took."""


class Stages(Moves):
    """Follows a pipeline of four stages. What waits raises DidNot."""

    def warm_up(self) -> WarmUp:
        """Kills the standby; until the next one is warm."""
        killed_s = time.time()
        os.kill(self.pid(self.ours.of("standby.warmed")[-1]["worker"]), signal.SIGKILL)
        self.moved += 1
        self.wait(self.replenished, SETTLE_S, "have a new standby ready")
        warmed = self.ours.of("standby.warmed")
        worker = warmed[-1]["worker"]
        own = [event for event in warmed if event["worker"] == worker]
        if len(own) != CLASSES or not all(event["replayed"] for event in own):
            raise DidNot(f"expected {worker} to be warm by {CLASSES} tapes, it said {own}")
        return WarmUp(
            began_at_s=own[0]["time_s"] - own[0]["warm_s"],
            ended_at_s=own[-1]["time_s"],
            until_warm_s=own[-1]["time_s"] - killed_s,
            cpu_s=spent_s(self.pid(worker)),
            classes={event["role_class"]: event["warm_s"] for event in own},
        )

    def pid(self, worker: str) -> int:
        return next(int(e["pid"]) for e in self.ours.of("worker.started") if e["worker"] == worker)


@contextmanager
def stages(
    folder: Path, *script: str, standbys: int = 1, core: int | None = None
) -> Iterator[Stages]:
    """A job that trains, its ranks on `core` if it is given, its standby warm; ended with the
    block."""

    def start(folder: Path) -> Migrated:
        options = (f"--layout=pp={RANKS}",)
        return Migrated(folder, *script, standbys=standbys, training="staged.py", options=options)

    with started(folder, start) as (_, job):
        run = Stages(job, folder, standbys)
        run.start(core)
        yield run


def beside(run: Stages) -> tuple[Beside, WarmUp]:
    """A warm-up after three stretches that are about as long."""
    until(run, time.time() + SETTLES_S)
    began_s = time.time()
    for _ in range(CLASSES * SET_UP):
        vocabulary()
    ended_s = time.time()
    long_s = ended_s - began_s
    until(run, ended_s + 2 * long_s)
    now_s = time.time()
    warm_up = run.warm_up()
    lines = run.history[-TURN:]
    turn = Beside(
        prepare=steps(lines, warm_up.began_at_s, warm_up.ended_at_s),
        before=steps(lines, now_s - long_s, now_s),
        again=steps(lines, now_s - 2 * long_s, now_s - long_s),
        alone=steps(lines, began_s, ended_s),
    )
    return turn, warm_up


def spent_s(pid: int) -> float:
    """CPU time of a process, its ended threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- what a recording leaves behind


def shares(lines: Sequence[Line], since_step: int = 0) -> list[float]:
    """CPU time of the second of PAIR over that of the first, in each window of steps."""
    cpu_s: dict[int, dict[int, float]] = defaultdict(dict)
    for line in lines:
        if line.what == COMMIT and line.step >= since_step:
            cpu_s[line.rank][line.step] = line.cpu_s
    first, second = (cpu_s[rank] for rank in PAIR)
    ends = sorted(first.keys() & second.keys())[::WINDOW]
    return [(second[b] - second[a]) / (first[b] - first[a]) for a, b in pairwise(ends)]


def crossed(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """What recording does to a rank, from shares of a job in which the second of PAIR recorded and
    of one in which the first did: what is between their places goes out. Two jobs of one kind give
    what a ratio of equals looks like."""
    return [math.sqrt(one / other) for one, other in zip(ones, others, strict=False)]


def recorded(run: Stages, windows: int) -> list[float]:
    """Trains until there are so many windows of steps."""
    run.read()
    since = max(line.step for line in run.lines)
    want = since + windows * WINDOW + 1
    run.wait(lambda: min(last(run.lines).values()) >= want, SETTLE_S, "train on")
    return shares(run.history, since)[:windows]


def last(lines: Sequence[Line]) -> dict[int, int]:
    """Rank -> its latest step."""
    return {line.rank: line.step for line in lines if line.what == COMMIT}
