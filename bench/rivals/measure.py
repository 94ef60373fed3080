"""One job of a system: kills its ranks from outside and measures what that costs."""

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jobs import Job, Kill
from ledger import (
    COMMIT,
    NORMAL_STEPS,
    RANKS,
    Line,
    Tail,
    durations,
    full_steps,
    normal_step_s,
    parse,
    recovered_s,
    reduced_s,
)

START_S = 240.0
RECOVER_S = 240.0
"""torchft at its defaults waits 60 s for a collective, then 60 s for a quorum."""
SETTLE_S = 180.0
LOOK_EVERY_S = 0.02
DRAWN_WITHIN_S = 1.0
"""A kill comes at a random moment of so many seconds: many steps of each system."""


class DidNot(Exception):
    """A job did not do in time what it should."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A kill and what it cost, in seconds."""

    system: str
    turn: int
    rank: int
    downtime_s: float | None
    """From SIGKILL to the first full step, less a normal one; None: it did not recover."""
    normal_step_s: float
    phases: dict[str, float]
    """Where the time went, in order; the last is the first step's."""
    reduced_s: float | None
    """Until the first step of fewer ranks, where a system goes on so."""
    why: str = ""
    """Why it did not recover."""


class Run:
    """Follows a job by its ledger."""

    def __init__(self, system: str, turn: int, job: Job, ledger: Path) -> None:
        self.system, self.turn, self.job = system, turn, job
        self.tail = Tail(ledger)
        self.lines: list[Line] = []

    def kills(self, number: int, draw: random.Random, done: Callable[[Outcome], None]) -> None:
        """Raises DidNot when the job cannot be killed again. Blocks; bounded by the waits."""
        self.wait(lambda: self.settled(0.0), START_S, "reach its normal course")
        self.wait(lambda: self.job.ready(0, self.lines), SETTLE_S, "have its standby ready")
        for index in range(number):
            time.sleep(draw.uniform(0.0, DRAWN_WITHIN_S))
            self.one(index, draw.randrange(RANKS), done)

    def one(self, index: int, rank: int, done: Callable[[Outcome], None]) -> None:
        self.read()
        kill, normal_s = self.kill(rank), normal_step_s(self.lines)
        try:
            self.wait(lambda: self.back(kill), RECOVER_S, "recover")
        except DidNot as error:
            done(Outcome(self.system, self.turn, rank, None, normal_s, {}, None, str(error)))
            raise
        try:
            self.wait(lambda: self.settled(kill.at_s), SETTLE_S, "come back to its course")
            self.wait(
                lambda: self.job.ready(index + 1, self.lines), SETTLE_S, "have a new standby ready"
            )
        finally:
            done(self.outcome(kill, normal_s))

    def kill(self, rank: int) -> Kill:
        pid = next(x.pid for x in reversed(self.lines) if x.rank == rank)
        at_s = time.time()
        os.kill(pid, signal.SIGKILL)
        return Kill(rank, pid, at_s)

    def outcome(self, kill: Kill, normal_s: float) -> Outcome:
        lines = [x for x in self.lines if x.time_s > kill.at_s]
        end_s = recovered_s(lines, kill.pid, kill.at_s)
        assert end_s is not None  # waited for
        found = self.job.moments(kill, lines)
        moments = {name: time_s for name, time_s in found.items() if time_s < end_s}
        fewer_s = reduced_s(lines, kill.at_s)
        return Outcome(
            system=self.system,
            turn=self.turn,
            rank=kill.rank,
            downtime_s=end_s - kill.at_s - normal_s,
            normal_step_s=normal_s,
            phases=durations(kill.at_s, {**moments, "first step": end_s}),
            reduced_s=None if fewer_s is None or fewer_s > end_s else fewer_s - kill.at_s,
        )

    def read(self) -> None:
        self.lines += [parse(text) for text in self.tail.new()]

    def settled(self, since_s: float) -> bool:
        """Enough full steps since then to know a normal one."""
        return len(full_steps(x for x in self.lines if x.time_s > since_s)) > NORMAL_STEPS

    def back(self, kill: Kill) -> bool:
        """Full strength again, and the killed process is replaced."""
        replaced = any(
            x.rank == kill.rank and x.pid != kill.pid and x.what == COMMIT for x in self.lines
        )
        return replaced and recovered_s(self.lines, kill.pid, kill.at_s) is not None

    def wait(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        deadline_s = time.monotonic() + within_s
        while True:
            self.read()
            if condition():
                return
            if ended := self.job.ended():
                raise DidNot(f"expected the job to {what}, but it {ended}")
            if time.monotonic() > deadline_s:
                raise DidNot(f"expected the job to {what} within {within_s:g} s, and it did not")
            time.sleep(LOOK_EVERY_S)
