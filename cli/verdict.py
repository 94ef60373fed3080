"""What a rehearsal found, as data and in words: where runs part, and what that usually means."""

from collections.abc import Iterator, Sequence
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from trainmover.cli.comparison import Comparison, Ran, compare, losses
from trainmover.cli.drills import happened
from trainmover.cli.incidents import Incident
from trainmover.schemas.fault import Fault

AROUND = 2
"""Losses are shown from so many steps before the difference to one after it."""
NAMED = 4
"""Objects and kills that one line names; the rest is counted."""


class Verdict(StrEnum):
    SAME = "same"
    NOT_DETERMINISTIC = "not deterministic"
    UNTRACKED_STATE = "untracked state"
    FAILED = "failed"


class OneRun(BaseModel):
    model_config = ConfigDict(frozen=True)

    title: str
    exit_code: int
    seconds: float
    completed_steps: int | None
    state_digest: str | None
    incidents: tuple[Incident, ...]


class Findings(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    verdict: Verdict
    runs: tuple[OneRun, ...]
    kills: tuple[str, ...]
    """Drawn; as `trainmover run --fault` reads them."""
    not_reached: tuple[str, ...]
    """Kills whose point was never reached, in a run that came to its end."""
    comparisons: tuple[Comparison, ...]
    """Of the first run with the second, the third."""
    losses: tuple[tuple[int, float, float], ...]
    """(step, first run, last run) around the difference, where the script reports a `loss`."""


def judge(runs: Sequence[Ran], kills: Sequence[Fault]) -> Findings:
    """The verdict on the runs so far: the first undisturbed, the second too, the third with
    `kills`. Only the last may differ or have failed."""
    first, last = runs[0], runs[-1]
    comparisons = tuple(compare(first, other) for other in runs[1:])
    found = comparisons[-1].difference if comparisons else None
    if last.exit_code:
        verdict = Verdict.FAILED
    elif found is None:
        verdict = Verdict.SAME
    else:
        verdict = Verdict.UNTRACKED_STATE if kills else Verdict.NOT_DETERMINISTIC
    awaited = () if last.exit_code else kills
    reached = happened(awaited, _incidents(last))
    around = range(found.step - AROUND, found.step + 2) if found else range(0)
    return Findings(
        verdict=verdict,
        runs=tuple(_one(run) for run in runs),
        kills=tuple(map(str, kills)),
        not_reached=tuple(str(kill) for kill in awaited if kill not in reached),
        comparisons=comparisons,
        losses=tuple(losses(first.lines, last.lines, around)),
    )


def _one(run: Ran) -> OneRun:
    return OneRun(
        title=run.title,
        exit_code=run.exit_code,
        seconds=run.seconds,
        completed_steps=run.report.completed_steps if run.report else None,
        state_digest=run.report.state_digest if run.report else None,
        incidents=_incidents(run),
    )


def _incidents(run: Ran) -> tuple[Incident, ...]:
    return run.report.incidents if run.report else ()


# ---- in words


def in_words(findings: Findings) -> Iterator[str]:
    """Lines for a person."""
    yield from _table(findings)
    for kill in findings.not_reached:
        yield f"the kill {kill} did not happen: its point was not reached in that step"
    yield from _reported(findings)
    last = len(findings.runs)
    match findings.verdict:
        case Verdict.SAME:
            yield _same(len(findings.kills) - len(findings.not_reached))
        case Verdict.NOT_DETERMINISTIC:
            yield f"DIFFERENT: runs 1 and {last}, both undisturbed: {_where(findings)}"
            yield from _losses(findings)
            yield from NO_DETERMINISM
        case Verdict.UNTRACKED_STATE:
            yield f"DIFFERENT: runs 1 and {last}, the one with kills: {_where(findings)}"
            yield from _losses(findings)
            yield f"before that: {', '.join(_kills_before(findings)) or 'no kill'}"
            yield from NOT_TRACKED
        case Verdict.FAILED:
            run = findings.runs[-1]
            yield f"FAILED: run {last}, {run.title}, ended with exit code {run.exit_code}"
            if findings.comparisons and findings.comparisons[-1].difference:
                yield f"until then: {_where(findings)}"


NO_DETERMINISM = (
    "The script is not deterministic: nobody was killed, so a recovery cannot be judged yet.",
    "Usual causes, the first for `rng` and `batches`, the second for a difference after step 0:",
    "  - numbers drawn from a generator that is not seeded, or from os.urandom, uuid or the time",
    "  - weights or data made so in set-up; a file that one run writes and the next one reads",
    "  - an order that is not fixed: of a directory's files, of threads, of results as they come",
    "  - more threads (--num-threads), or operations that torch documents as nondeterministic",
)
NOT_TRACKED = (
    "Undisturbed runs are the same, so something that training depends on did not move with a",
    "rank that died, or did not go back with a step that was undone. Usual causes:",
    "  - a plain Python variable: a counter, a running mean, a best loss. Put it into ctx.vars",
    "  - an object that ctx.track was not given; one with state needs state_dict",
    "  - a generator or an iterator of your own, made in set-up and drawn from in a block",
    "  - ctx.local_rank, a process id or a file that the rank had written",
    "  - random numbers drawn, or ctx.vars changed, after optimizer.step() or between blocks",
)


def _same(kills: int) -> str:
    if not kills:
        return "SAME, but nobody was killed: give more --steps, or another --seed"
    return (
        f"SAME: {kills} kill{'' if kills == 1 else 's'} left no trace; every state after a step"
        " and the one at the end are those of the undisturbed runs"
    )


def _where(findings: Findings) -> str:
    found = findings.comparisons[-1].difference
    assert found is not None
    if not found.ranks:
        ends = [run.completed_steps for run in (findings.runs[0], findings.runs[-1])]
        if ends[0] != ends[1]:
            return f"one ends after {ends[0]} steps, the other after {ends[1]}"
        return f"the states after a step are the same, the state at the end (step {ends[0]}) is not"
    rest = [f"`{name}`" for name in found.objects[1:NAMED]]
    if len(found.objects) > NAMED:
        rest.append(f"{len(found.objects) - NAMED} more")
    if len(found.ranks) > 1:
        rest.append(f"rank{'s' if len(found.ranks) > 2 else ''} {_listed(found.ranks[1:])}")
    also = f" (and {', '.join(rest)})" if rest else ""
    first = f"`{found.objects[0]}` of rank {found.ranks[0]}"
    return f"{first} differs for the first time after step {found.step}{also}"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:NAMED]))
    return shown if len(ranks) <= NAMED else f"{shown} and {len(ranks) - NAMED} more"


def _kills_before(findings: Findings) -> list[str]:
    found = findings.comparisons[-1].difference
    assert found is not None
    kills = [Fault.parse(k) for k in findings.kills if k not in findings.not_reached]
    return [
        f"rank {kill.rank} was killed in step {kill.step} at `{kill.at}`"
        for kill in kills
        if kill.step is not None and kill.step <= found.step
    ]


def _table(findings: Findings) -> Iterator[str]:
    if not findings.comparisons:
        return
    yield f"{'runs':<8}{'states compared':>17}  result"
    for number, comparison in enumerate(findings.comparisons, 2):
        found = comparison.difference
        result = "same" if found is None else f"differ after step {found.step}"
        yield f"{f'1 and {number}':<8}{comparison.num_digests:>17}  {result}"


def _losses(findings: Findings) -> Iterator[str]:
    found = findings.comparisons[-1].difference
    if not findings.losses or found is None:
        return
    yield f"{'step':>6}  {'loss in run 1':<22}in run {len(findings.runs)}"
    for step, one, other in findings.losses:
        mark = "  <- differs" if repr(one) != repr(other) else ""
        yield f"{step:>6}  {one!r:<22}{other!r}{mark}"


def _reported(findings: Findings) -> Iterator[str]:
    """Numbers alone are no verdict: they may be times, and a rank that dies after the update
    takes what it reported there with it."""
    for number, comparison in enumerate(findings.comparisons, 2):
        if comparison.numbers:
            names = ", ".join(f"{n} (step {s})" for n, s in comparison.numbers.items())
            yield f"reported differently in runs 1 and {number}, while states were equal: {names}"
            if number > 2:
                yield "  (a rank that dies after its update has not reported: report before it)"
