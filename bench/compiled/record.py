"""What the ranks of a job with a compiled model write into one file, and what is read from it.

A line is a `Line` as JSON, appended in one write; all clocks are that of one machine.
"""

import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

COMMIT, SHADOW = "commit", "shadow"
NORMAL_STEPS = 20
"""A normal step is the median of so many before a rank moves."""
UNKNOWN = -1
"""Rank of a process that may not know it yet."""


@dataclass(frozen=True, slots=True)
class Line:
    time_s: float
    """Seconds since 1970, when the step was over."""
    pid: int
    what: str
    rank: int = UNKNOWN
    step: int = 0
    seconds: float = 0.0
    """Of the step's block."""
    cpu_s: float = 0.0
    """That the process used in it, all its threads."""
    graphs: int = 0
    """That dynamo has compiled in this process so far."""


class Record:
    """The writing side, in a rank."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, what: str, rank: int = UNKNOWN, step: int = 0, **of_step: Any) -> None:
        line = Line(time.time(), os.getpid(), what, rank, step, **of_step)
        os.write(self._file, f"{json.dumps(asdict(line))}\n".encode())


def training_goes_on(path: Path) -> bool:
    """Whether a step was committed: who comes now takes over."""
    return f'"what": "{COMMIT}"' in path.read_text()


def parse(text: str) -> Line:
    return Line(**json.loads(text))


def full_steps(lines: Iterable[Line], num_ranks: int) -> list[tuple[int, float]]:
    """(step, when the last of its ranks committed it), in order of time.

    A step that a rank did twice counts by the later line.
    """
    steps: dict[int, dict[int, float]] = defaultdict(dict)
    for line in lines:
        if line.what == COMMIT:
            steps[line.step][line.rank] = line.time_s
    whole = [
        (step, max(times.values())) for step, times in steps.items() if len(times) == num_ranks
    ]
    return sorted(whole, key=lambda entry: entry[1])


def normal_step_s(lines: Sequence[Line], num_ranks: int) -> float:
    """Median time between the last full steps."""
    times = [time_s for _, time_s in full_steps(lines, num_ranks)][-NORMAL_STEPS - 1 :]
    return statistics.median(after - before for before, after in pairwise(times))


def normal_block(lines: Iterable[Line], rank: int) -> tuple[float, float]:
    """Medians of a rank's last blocks: seconds, and seconds of CPU."""
    last = [x for x in lines if x.what == COMMIT and x.rank == rank][-NORMAL_STEPS:]
    return statistics.median(x.seconds for x in last), statistics.median(x.cpu_s for x in last)


def holder(lines: Iterable[Line], rank: int) -> int:
    """Pid of the process that committed last in this rank."""
    return [x.pid for x in lines if x.what == COMMIT and x.rank == rank][-1]


def compiled_since(lines: Iterable[Line], pid: int, since_s: float) -> int:
    """Graphs that a process has compiled after that."""
    counts = [(x.time_s, x.graphs) for x in lines if x.pid == pid]
    before = max((n for time_s, n in counts if time_s <= since_s), default=0)
    return max((n for _, n in counts), default=0) - before
