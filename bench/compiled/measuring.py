"""A job is disturbed again and again, and what each time costs by its record."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ledger import Tail
from measure import DidNot
from record import (
    COMMIT,
    NORMAL_STEPS,
    Line,
    compiled_since,
    full_steps,
    holder,
    normal_block,
    normal_step_s,
    parse,
)
from running import FIRST_STEP, RANK, Job, Promoted, first_full_s, kill

START_S, RECOVER_S, SETTLE_S = 600.0, 600.0, 600.0
"""Compiling takes minutes where cores are few."""
LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Move:
    """RANK has got a new process. Durations in seconds."""

    case: str
    planned: bool
    downtime_s: float
    """From SIGKILL (planned: from the last step before the pause) to the first full step, less a
    normal one."""
    normal_step_s: float
    first_block_s: float
    """The new process's first step by its own clock."""
    normal_block_s: float
    """The rank's step before, likewise."""
    first_block_cpu_s: float
    normal_block_cpu_s: float
    num_graphs: int
    """That dynamo compiled in the new process from then on, normal steps after it included."""
    set_up_s: float
    """`train` up to its first step, as the worker says; 0 where it went on with the parked call."""
    phases: dict[str, float]
    """Where the downtime went; the first step is less a normal one."""


class Measured:
    """One job. What waits raises DidNot."""

    def __init__(self, case: str, job: Job, folder: Path) -> None:
        self.case, self.job, self.folder = case, job, folder
        self.tail = Tail(folder / "record")
        self.lines: list[Line] = []
        self.moves = 0
        self.since_s = 0.0

    def killed(self) -> Move:
        """Waits for the normal course and a standby, then for the end of the disturbance."""
        self.settle()
        pid, normal_s = holder(self.lines, RANK), normal_step_s(self.lines, self.job.num_ranks)
        block = normal_block(self.lines, RANK)
        at_s = kill(self.lines)
        self.wait(lambda: self.replaced(pid, at_s), RECOVER_S, "recover")
        return self.moved(at_s, normal_s, block, planned=False)

    def migrated(self) -> Move:
        """The same without a fault; for `trainmover run`."""
        assert isinstance(self.job, Promoted)
        self.settle()
        pid, normal_s = holder(self.lines, RANK), normal_step_s(self.lines, self.job.num_ranks)
        block, at_s = normal_block(self.lines, RANK), time.time()
        self.job.migrate()
        self.wait(lambda: self.replaced(pid, at_s), RECOVER_S, "move")
        joiner = holder(self.lines, RANK)
        first = min(x.step for x in self.lines if x.pid == joiner and x.what == COMMIT)
        before_s = dict(full_steps(self.lines, self.job.num_ranks))[first - 1]
        return self.moved(before_s, normal_s, block, planned=True)

    def moved(
        self, since_s: float, normal_s: float, block: tuple[float, float], *, planned: bool
    ) -> Move:
        self.moves += 1
        done = self.moves
        if isinstance(self.job, Promoted):
            job = self.job
            self.wait(
                lambda: job.ready(0) and len(job.of("migration.completed")) >= done,
                SETTLE_S,
                "say what it did",
            )
        joiner = holder(self.lines, RANK)
        end_s = first_full_s(self.lines, since_s, joiner, self.job.num_ranks)
        first = next(x for x in self.lines if x.pid == joiner and x.what == COMMIT)
        phases = self.job.phases(since_s, normal_s, self.lines)
        phases[FIRST_STEP] -= normal_s
        self.since_s = end_s
        self.wait(self.normal, SETTLE_S, "come back to its course")
        joined = self.job.joined() if isinstance(self.job, Promoted) else None
        return Move(
            case=self.case,
            planned=planned,
            downtime_s=end_s - since_s - normal_s,
            normal_step_s=normal_s,
            first_block_s=first.seconds,
            normal_block_s=block[0],
            first_block_cpu_s=first.cpu_s,
            normal_block_cpu_s=block[1],
            num_graphs=compiled_since(self.lines, joiner, since_s),
            set_up_s=joined["setup_s"] if joined and joined["bound"] == "again" else 0.0,
            phases=phases,
        )

    def settle(self) -> None:
        if not self.moves:
            self.wait(self.normal, START_S, "reach its normal course")
        self.wait(lambda: self.job.ready(self.moves), SETTLE_S, "have its standby ready")
        self.since_s = time.time()  # warming up is over: these are the steps that count
        self.wait(self.normal, SETTLE_S, "come back to its course")

    def normal(self) -> bool:
        lines = [x for x in self.lines if x.time_s > self.since_s]
        return len(full_steps(lines, self.job.num_ranks)) > NORMAL_STEPS

    def replaced(self, pid: int, since_s: float) -> bool:
        """Whether all ranks committed a step, and RANK in another process."""
        lines = [x for x in self.lines if x.time_s > since_s and x.pid != pid]
        return bool(full_steps(lines, self.job.num_ranks))

    def wait(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        deadline_s = time.monotonic() + within_s
        while True:
            self.lines += [parse(text) for text in self.tail.new()]
            if condition():
                return
            if ended := self.job.ended():
                raise DidNot(f"expected the job to {what}, but it {ended}")
            if time.monotonic() > deadline_s:
                raise DidNot(f"expected the job to {what} within {within_s:g} s, and it did not")
            time.sleep(LOOK_EVERY_S)
