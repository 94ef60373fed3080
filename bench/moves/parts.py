"""What is done to the jobs: moves of one rank and more, stretches beside a prepare, endurance."""

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import copying
from findings import Beside
from jobs import Job, Migrated, Restarted
from ledger import RANKS, Line
from measure import RECOVER_S, SETTLE_S, START_S, DidNot, Run
from moving import Move, Moves
from stretches import Interruption, Period, Stretch, done_again, periods, stretch
from vocabulary import vocabulary

STANDBYS = 3
BATCH = "--batch=16"
"""A short step is known better. Endurance takes that of the other benches, as its rival does."""
SET_UP = 2
"""Seconds, more or less, that a joiner's set-up works where it is measured what that costs."""
TRAINED_BYTES = 50_000_000
"""More than model, optimizer and structure take."""
SETTLES_S = 1.0
LATEST = 0.8
"""Of a period: what is back later leaves too little undisturbed."""

J = TypeVar("J", bound=Job)


@dataclass
class Measured:
    """What there is so far."""

    moves: list[Move] = field(default_factory=list)
    turns: list[Beside] = field(default_factory=list)
    endured: dict[str, list[Period]] = field(default_factory=dict)
    endured_moves: list[Move] = field(default_factory=list)
    done_again: int = 0
    """Steps that a rank of ours committed more than once."""


@dataclass(frozen=True)
class Parts:
    """Each blocks, and raises DidNot where a job does not what it should."""

    out: Path
    state_mb: int
    draws: random.Random
    measured: Measured
    say: Callable[[str], None]

    def moves(self, times: dict[int, int]) -> None:
        """Ranks at once -> how often, in turns; next to each move a raw copy of as much."""
        with (
            copying.started(max(times), TRAINED_BYTES + 1_000_000 * self.state_mb) as pairs,
            self.ours("moves", STANDBYS, BATCH) as run,
        ):
            for turn in range(max(times.values())):
                for size in (size for size, often in times.items() if turn < often):
                    move = run.move(self.draws.sample(range(RANKS), size))
                    with run.stopped():
                        raw_s = pairs.copy(move.num_bytes, size)
                    self.measured.moves.append(replace(move, raw_s=raw_s))
                    self.say(f"  {size} moved: {move.downtime_s:.3f} s, raw copy {raw_s:.3f} s")

    def prepares(self, times: int) -> None:
        """The ranks on one core, and all else on another."""
        script = (BATCH, *["--expensive"] * SET_UP)
        with apart() as core, self.ours("prepares", 1, *script, core=core) as run:
            for _ in range(times):
                run.pin(core)
                turn = beside(run, self.draws.randrange(RANKS))
                self.measured.turns.append(turn)
                ratios = (f"{name} {x:.3f}" for name, x in turn.ratios("cpu_s").items())
                self.say(f"  CPU of a step in {turn.prepare.steps} steps: {', '.join(ratios)}")

    def endurance(self, every_s: float, times: int, restarts: int) -> None:
        """A move every so often, and in a job of torchrun a kill, which restarts all ranks."""

        def moves() -> None:
            move = run.move([self.draws.randrange(RANKS)])
            self.measured.endured_moves.append(move)
            self.say(f"  moved: {move.downtime_s:.3f} s")

        with self.ours("endurance", 1) as run:
            done = spaced(run, every_s, times, moves)
            self.measured.endured["ours"] = periods(run.history, *done)
        if not restarts:
            return

        def kills() -> None:
            kill = rival.kill(self.draws.randrange(RANKS))
            rival.wait(lambda: rival.back(kill), RECOVER_S, "recover")
            self.say(f"  restarted: {time.time() - kill.at_s:.1f} s")

        self.say("restart: starting")
        with started(self.out / "restart", Restarted) as (folder, job):
            rival = Run("restart", 0, job, folder / "ledger")
            rival.wait(lambda: rival.settled(0.0), START_S, "reach its normal course")
            done = spaced(rival, every_s, restarts, kills)
            self.measured.endured["restart"] = periods(rival.lines, *done)

    # ---- jobs

    @contextmanager
    def ours(
        self, name: str, standbys: int, *script: str, core: int | None = None
    ) -> Iterator[Moves]:
        """A job that trains, its standbys parked; ended with the block."""

        def start(folder: Path) -> Migrated:
            return Migrated(folder, f"--state-mb={self.state_mb}", *script, standbys=standbys)

        self.say(f"{name}: starting")
        with started(self.out / name, start) as (folder, job):
            run = Moves(job, folder, standbys)
            run.start(core)
            yield run
            self.measured.done_again += done_again(run.history)


@contextmanager
def started(folder: Path, start: Callable[[Path], J]) -> Iterator[tuple[Path, J]]:
    """A job in a new folder, ended with the block."""
    folder.mkdir()
    job = start(folder)
    try:
        yield folder, job
    finally:
        job.stop()


@contextmanager
def apart() -> Iterator[int]:
    """The bench, and all that it starts in the block, has one core; yields that of the ranks."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise DidNot("expected two cores, one for the ranks and one for all else")
    os.sched_setaffinity(0, cores[1:2])
    try:
        yield cores[0]
    finally:
        os.sched_setaffinity(0, cores)


def beside(run: Moves, rank: int) -> Beside:
    """Moves a rank after three stretches that are as long as the set-up of its joiner."""
    until(run, time.time() + SETTLES_S)
    began_s = time.time()
    for _ in range(SET_UP):
        vocabulary()
    ended_s = time.time()
    long_s = ended_s - began_s
    until(run, ended_s + 2 * long_s)
    move = run.move([rank])
    announced_s = move.announced_at_s
    return Beside(
        prepare=steps(run.lines, move.planned_at_s, move.prepared_at_s),
        before=steps(run.lines, announced_s - long_s, announced_s),
        again=steps(run.lines, announced_s - 2 * long_s, announced_s - long_s),
        alone=steps(run.lines, began_s, ended_s),
    )


def steps(lines: Sequence[Line], begin_s: float, end_s: float) -> Stretch:
    found = stretch(lines, begin_s, end_s)
    if found is None:
        raise DidNot(f"expected steps of the same ranks within {end_s - begin_s:.1f} s, found none")
    return found


def spaced(
    run: Run, every_s: float, times: int, interrupt: Callable[[], None]
) -> tuple[list[Interruption], float]:
    """Interrupts so often; returns that, and when the last period ended, seconds since 1970.

    Nothing disturbs the second half of a period, from when all is as before the interruption."""
    found = []
    for _ in range(times):
        at_s = time.time()
        interrupt()
        over_s = max(time.time(), at_s + every_s / 2)
        if over_s > at_s + LATEST * every_s:
            raise DidNot(f"expected to be back in a part of {every_s:g} s, not {over_s - at_s:.1f}")
        found.append(Interruption(at_s, over_s))
        until(run, at_s + every_s)
    return found, time.time()


def until(run: Run, end_s: float) -> None:
    """Trains on."""
    left_s = max(0.0, end_s - time.time())
    run.wait(lambda: time.time() >= end_s, left_s + SETTLE_S, "train on")
