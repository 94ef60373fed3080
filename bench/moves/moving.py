"""One job of ours whose ranks are moved to standbys, and what each move costs by its ledger."""

import os
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from children import Child
from environment import variables
from jobs import Migrated
from ledger import COMMIT, NORMAL_STEPS, RANKS, Line, durations, normal_step_s, parse, pause
from measure import SETTLE_S, START_S, DidNot, Run

MOVE_S = 120.0
RECENT = 500 * RANKS
"""Lines that are looked at again and again; reading all of a long job would take a core."""
MARKS = ("frozen", "collected", "restored", "resumed")
"""Of what each worker says that it reached; the last of them counts."""


@dataclass(frozen=True, slots=True)
class Move:
    """Some ranks have got new processes. Durations `*_s`; `*_at_s` are seconds since 1970."""

    ranks: tuple[int, ...]
    downtime_s: float
    """From the last step without the new processes to the first with them, less a normal one."""
    normal_step_s: float
    """Before it was announced."""
    phases: dict[str, float]
    """Where the time went, in order; the first is until all ranks stand, the last is a step."""
    num_bytes: int
    """Of the largest state that went over."""
    announced_at_s: float
    """Before the command was started that announces it."""
    planned_at_s: float
    prepared_at_s: float
    raw_s: float | None = None
    """What a raw copy of as many bytes between as many pairs took, right after it."""


class Moves(Run):
    """Follows the job and moves its ranks. What waits raises DidNot."""

    def __init__(self, job: Migrated, folder: Path, standbys: int) -> None:
        super().__init__("ours", 0, job, folder / "ledger")
        self.ours, self.folder, self.standbys = job, folder, standbys
        self.moved = 0
        self.history: list[Line] = []
        """All lines; `lines` are the recent ones."""

    def start(self, core: int | None = None) -> None:
        """Until it trains, on `core` if it is given, and every standby is parked."""
        self.wait(lambda: self.steady(0.0), START_S, "reach its normal course")
        if core is not None:  # now: standbys warm up at a low priority, on what is left
            self.pin(core)
        self.wait(self.replenished, SETTLE_S, "have its standbys ready")

    def move(self, ranks: Sequence[int]) -> Move:
        """Until they have moved and all is as before."""
        self.read()
        old, normal_s, announced_s = self.pids, normal_step_s(self.lines), time.time()
        words = [f"--rank={rank}" for rank in ranks]
        command = Child([*self.ours.migrate, *words], variables(), self.folder / "migrate.log")
        try:
            self.wait(lambda: bool(command.ended()), MOVE_S, f"move ranks {ranks}")
        finally:
            command.stop()
        if command.process.returncode:
            raise DidNot(f"expected ranks {ranks} to move, but migrate {command.ended()}")
        ended_s, self.moved = time.time(), self.moved + len(ranks)
        self.wait(lambda: self.steady(ended_s), SETTLE_S, "come back to its course")
        new = self.pids
        if {rank for rank in old if old[rank] != new[rank]} != set(ranks):
            raise DidNot(f"expected ranks {ranks} to get new processes: {old} before, {new} after")
        if (found := pause(self.lines, {new[rank] for rank in ranks})) is None:
            raise DidNot(f"expected the steps before and after the move of ranks {ranks}")
        self.wait(self.replenished, SETTLE_S, "have new standbys ready")
        events = self.last_migration()
        last_s, first_s = found
        return Move(
            ranks=tuple(ranks),
            downtime_s=first_s - last_s - normal_s,
            normal_step_s=normal_s,
            phases=durations(last_s, {**moments(events), "first step": first_s}),
            num_bytes=max(one["num_bytes"] for one in events["switched"]["restored"]),
            announced_at_s=announced_s,
            planned_at_s=events["planned"]["time_s"],
            prepared_at_s=events["prepared"]["time_s"],
        )

    def last_migration(self) -> dict[str, dict[str, Any]]:
        """Its events, by the second half of their names."""
        generation = self.ours.of("migration.completed")[-1]["generation"]
        return {
            event["type"].removeprefix("migration."): event
            for event in self.ours.events
            if event["type"].startswith("migration.") and event["generation"] == generation
        }

    def read(self) -> None:
        self.history += [parse(text) for text in self.tail.new()]
        self.lines = self.history[-RECENT:]

    def steady(self, since_s: float) -> bool:
        """Enough steps since then to know a normal one."""
        last = self.lines[-RANKS * (NORMAL_STEPS + 2) :]
        return len(last) == RANKS * (NORMAL_STEPS + 2) and last[0].time_s > since_s

    def replenished(self) -> bool:
        """Every standby is parked, those that replace the leavers too."""
        return self.ours.ready(self.moved + self.standbys - 1, self.lines)

    @property
    def pids(self) -> dict[int, int]:
        """Rank -> its process, by its last line."""
        return {line.rank: line.pid for line in self.lines if line.what == COMMIT}

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The ranks hold still, as they do while a state goes over."""
        pids: Collection[int] = self.pids.values()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def pin(self, core: int) -> None:
        """All threads of the ranks to one core."""
        for pid in self.pids.values():
            for task in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {core})


def moments(events: dict[str, dict[str, Any]]) -> dict[str, float]:
    """What of a migration was reached when, in order of time: by its last rank, or stored."""
    ranks = events["completed"]["ranks"]
    found = {mark: max(rank["reached"].get(mark, 0.0) for rank in ranks) for mark in MARKS}
    found |= {name: events[name]["time_s"] for name in ("decided", "switched")}
    return dict(sorted(found.items(), key=lambda entry: entry[1]))
