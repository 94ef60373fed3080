"""What the ledger of a job says of stretches of time: steps, what they took, what was lost."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from ledger import COMMIT, RANKS, Line, full_steps


@dataclass(frozen=True, slots=True)
class Stretch:
    """Whole steps between two moments."""

    steps: int
    wall_s: float
    """Of a step."""
    cpu_s: float
    """Of a step, of all ranks together."""


def stretch(lines: Sequence[Line], begin_s: float, end_s: float) -> Stretch | None:
    """From the first step committed in it to the last; None where there are not two, or where a
    rank changed its process between them."""
    steps = [(step, at) for step, at in full_steps(lines) if begin_s <= at <= end_s]
    if len(steps) < 2:
        return None
    (first, since_s), (last, until_s) = steps[0], steps[-1]
    cpu: dict[int, dict[int, float]] = defaultdict(dict)
    for line in lines:
        if line.what == COMMIT and line.step in (first, last):
            cpu[line.pid][line.step] = line.cpu_s
    if len(cpu) != RANKS:
        return None
    spent_s = sum(times[last] - times[first] for times in cpu.values())
    count = len(steps) - 1
    return Stretch(count, (until_s - since_s) / count, spent_s / count)


@dataclass(frozen=True, slots=True)
class Interruption:
    """Seconds since 1970."""

    at_s: float
    over_s: float
    """From then on nothing disturbs."""


@dataclass(frozen=True, slots=True)
class Period:
    """From one interruption to the next."""

    steps: int
    wall_s: float
    undisturbed_s: float
    """Of a step, after the interruption was over."""


def periods(
    lines: Sequence[Line], interruptions: Sequence[Interruption], end_s: float
) -> list[Period]:
    """From the last step before an interruption to the last before the next, so that together they
    leave nothing out. Raises ValueError for one without steps after its interruption."""
    steps = full_steps(lines)
    ends_s = [*(i.at_s for i in interruptions[1:]), end_s]
    found = []
    for interruption, until_s in zip(interruptions, ends_s, strict=True):
        undisturbed = stretch(lines, interruption.over_s, until_s)
        if undisturbed is None:
            raise ValueError(f"expected steps before {until_s:.3f}, found none")
        first, last = (
            bisect_right(steps, at, key=itemgetter(1)) - 1 for at in (interruption.at_s, until_s)
        )
        wall_s = steps[last][1] - steps[first][1]
        found.append(Period(last - first, wall_s, undisturbed.wall_s))
    return found


def effective(of: Iterable[Period]) -> float:
    """Share of the wall time that the committed steps take undisturbed."""
    found = list(of)
    return sum(p.steps * p.undisturbed_s for p in found) / sum(p.wall_s for p in found)


def done_again(lines: Iterable[Line]) -> int:
    """Committed steps of a rank that were committed once more."""
    times: Mapping[tuple[int, int], list[Line]] = defaultdict(list)
    for line in lines:
        if line.what == COMMIT:
            times[line.rank, line.step].append(line)
    return sum(len(found) - 1 for found in times.values())
