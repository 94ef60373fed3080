"""Two runs of one script, step by step: which tracked object differs first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from trainmover.cli.report import Report
from trainmover.schemas.steplog import StepLine

LOOP = "trainmover_loop"
"""Not compared step by step: a rank may hear of a `step.stop()` after it has noted its digest."""
CAUSES_FIRST = ("rng.", "batches.", "ctx.vars")
"""What decides a step before the step changes models and optimizers."""
BUFFER = "buffer."

Lines = Mapping[tuple[int, int], StepLine]
"""(step, rank) -> state after it."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a run left; a rank that died between a commit and its line has none of that step."""

    title: str
    exit_code: int
    seconds: float
    lines: Lines
    report: Report | None
    """None: it ended before it could write one."""


class Difference(BaseModel):
    """Where two runs part."""

    model_config = ConfigDict(frozen=True)

    step: NonNegativeInt
    """After this step they differ for the first time."""
    ranks: tuple[NonNegativeInt, ...]
    """On these; empty: only the states at the ends differ."""
    objects: tuple[str, ...]
    """Tracked names and parts of own state of the first of them, likely causes first."""


class Comparison(BaseModel):
    model_config = ConfigDict(frozen=True)

    num_digests: NonNegativeInt
    """States after a step that both runs have noted."""
    difference: Difference | None
    numbers: dict[str, NonNegativeInt]
    """What the script reported differently: name -> first such step before the difference."""


def compare(one: Ran, other: Ran) -> Comparison:
    """The first step decides, then what both have; `one` ended well, `other` may have failed."""
    both = sorted(one.lines.keys() & other.lines.keys())
    difference = _in_a_step(one.lines, other.lines, both) or _at_the_end(one, other)
    before = both if difference is None else [at for at in both if at[0] < difference.step]
    return Comparison(
        num_digests=len(both),
        difference=difference,
        numbers=_differing_numbers(one.lines, other.lines, before),
    )


def _in_a_step(one: Lines, other: Lines, both: Sequence[tuple[int, int]]) -> Difference | None:
    differing = {at: _objects(one[at], other[at]) for at in both}
    first = next((step for (step, _), objects in differing.items() if objects), None)
    if first is None:
        return None
    ranks = tuple(rank for (step, rank), objects in differing.items() if step == first and objects)
    return Difference(step=first, ranks=ranks, objects=differing[first, ranks[0]])


def _at_the_end(one: Ran, other: Ran) -> Difference | None:
    if one.report is None or other.report is None or other.exit_code:
        return None  # a run that failed has no end to compare
    ends = [(r.completed_steps, r.state_digest) for r in (one.report, other.report)]
    if ends[0] == ends[1]:
        return None
    return Difference(step=min(steps or 0 for steps, _ in ends), ranks=(), objects=())


def _objects(one: StepLine, other: StepLine) -> tuple[str, ...]:
    names = dict.fromkeys((*one.objects, *other.objects))
    found = [n for n in names if n != LOOP and one.objects.get(n) != other.objects.get(n)]
    found.reverse()  # modules were noted first, and are the last to be a cause
    return tuple(sorted(found, key=_effect))


def _effect(name: str) -> int:
    """0 for what is rather a cause, more for what is rather an effect."""
    if name.startswith(CAUSES_FIRST):
        return 0
    return 2 if name.startswith(BUFFER) else 1


def _differing_numbers(one: Lines, other: Lines, both: Sequence[tuple[int, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for at in both:
        pair = one[at].numbers, other[at].numbers
        for name in pair[0].keys() & pair[1].keys():
            if repr(pair[0][name]) != repr(pair[1][name]):  # NaN is the same as NaN here
                found.setdefault(name, at[0])
    return found


def losses(one: Lines, other: Lines, steps: range) -> list[tuple[int, float, float]]:
    """(step, loss in one, loss in the other) of those steps that have both."""
    found: dict[int, tuple[int, float, float]] = {}
    for step, rank in sorted(one.keys() & other.keys()):
        pair = [lines[step, rank].numbers.get("loss") for lines in (one, other)]
        if step in steps and pair[0] is not None and pair[1] is not None:
            found.setdefault(step, (step, pair[0], pair[1]))
    return list(found.values())
