"""What the ranks of every compared system write into one file, and what is read from it.

A line is `time rank pid what step strength cpu`: time in seconds since 1970 (one machine, one
clock), strength the number of ranks whose gradients were in the update, cpu the seconds of CPU that
the process has used. Lines are appended in one write.
"""

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

COMMIT = "commit"
RANKS = 4
NORMAL_STEPS = 20
"""A normal step is the median of so many before a kill."""


@dataclass(frozen=True, slots=True)
class Line:
    time_s: float
    rank: int
    pid: int
    what: str
    step: int = 0
    strength: int = 0
    cpu_s: float = 0.0


class Ledger:
    """The writing side, in a rank."""

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, what: str, rank: int, step: int = 0, strength: int = 0) -> None:
        cpu_s = time.process_time()
        line = f"{time.time():.6f} {rank} {os.getpid()} {what} {step} {strength} {cpu_s:.6f}\n"
        os.write(self.file, line.encode())


class Tail:
    """Follows a file that others append to, by whole lines. It is made if it is not there."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self.path = path
        self.seen = 0
        self.rest = ""

    def new(self) -> list[str]:
        with self.path.open() as file:
            file.seek(self.seen)
            *whole, self.rest = (self.rest + file.read()).split("\n")
            self.seen = file.tell()
        return whole


def parse(text: str) -> Line:
    time_s, rank, pid, what, step, strength, cpu_s = text.split()
    return Line(float(time_s), int(rank), int(pid), what, int(step), int(strength), float(cpu_s))


def full_steps(lines: Iterable[Line]) -> list[tuple[int, float]]:
    """(step, when its last rank committed it) of the steps at full strength, in order of time.

    A step that a rank did twice counts by the later line.
    """
    steps: dict[int, dict[int, float]] = defaultdict(dict)
    for line in lines:
        if line.what == COMMIT and line.strength == RANKS:
            steps[line.step][line.rank] = line.time_s
    whole = [(step, max(times.values())) for step, times in steps.items() if len(times) >= RANKS]
    return sorted(whole, key=lambda entry: entry[1])


def recovered_s(lines: Iterable[Line], killed: int, at_s: float) -> float | None:
    """When the first full step after the kill of process `killed` was committed, if one was."""
    after = full_steps(x for x in lines if x.time_s > at_s and x.pid != killed)
    return after[0][1] if after else None


def pause(lines: Sequence[Line], joined: Collection[int]) -> tuple[float, float] | None:
    """When the last full step without the processes `joined` was committed, and the first with
    them; None as long as there is none."""
    first = min((x.step for x in lines if x.what == COMMIT and x.pid in joined), default=None)
    times = dict(full_steps(lines))
    if first is None or first not in times or first - 1 not in times:
        return None
    return times[first - 1], times[first]


def reduced_s(lines: Iterable[Line], at_s: float) -> float | None:
    """When the first step after `at_s` was committed by fewer ranks, if one was."""
    found = [
        x.time_s for x in lines if x.what == COMMIT and x.time_s > at_s and 0 < x.strength < RANKS
    ]
    return min(found, default=None)


def normal_step_s(lines: Sequence[Line]) -> float:
    """Median time between the last NORMAL_STEPS full steps."""
    times = [time_s for _, time_s in full_steps(lines)][-NORMAL_STEPS - 1 :]
    return statistics.median(b - a for a, b in pairwise(times))


def durations(at_s: float, moments: dict[str, float]) -> dict[str, float]:
    """Of each moment, the seconds since the one before it, the first since `at_s`."""
    found: dict[str, float] = {}
    for name, time_s in moments.items():
        found[name] = max(0.0, time_s - at_s)
        at_s = max(at_s, time_s)
    return found
