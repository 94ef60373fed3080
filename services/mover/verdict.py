"""Commit or retry: the one step count from which every member continues (commit.md, Decide).

ALL: computed only from the answers of every member; T is the largest number of committed steps
in them. No word commit or retry leaves here, only T, with who can restore whom.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from trainmover.schemas.commands import Answer
from trainmover.schemas.events import MigrationPlanned, Source
from trainmover.schemas.layout import Layout
from trainmover.schemas.member import Member
from trainmover.schemas.shards import NO_HOLDER, NOT_SAID, Shards, in_words, lost, sources


@dataclass(frozen=True, slots=True)
class Verdict:
    target: int = 0
    setup_again: bool = False
    sources: tuple[Source, ...] = ()
    dirty: tuple[int, ...] = ()
    holding: tuple[int, ...] = ()
    problem: str = ""
    """Why no decision is possible; empty when there is one."""
    state_lost: bool = False


def verdict(
    layout: Layout,
    plan: MigrationPlanned,
    answers: Mapping[str, Answer],
    shards: Shards = NOT_SAID,
) -> Verdict:
    """`answers` holds one answer per member and leaver of the plan, all about its generation."""
    full = [m for m in (*plan.members, *plan.leavers) if not answers[m.worker].empty]
    if not full:
        return Verdict(problem="no member of the plan holds state of the job", state_lost=True)
    target = max(answers[m.worker].committed for m in full)
    if any(not answers[m.worker].set_up for m in full):
        if target > 0:
            return Verdict(problem=f"a rank is in set-up while others committed {target} steps")
        return Verdict(target=0, setup_again=True)
    wrong = [m for m in full if not _can_reach(answers[m.worker], target)]
    if wrong:
        ranks = ", ".join(f"rank {m.rank} at {answers[m.worker].committed}" for m in wrong)
        return Verdict(problem=f"bug: the furthest rank committed {target} steps, but {ranks}")
    dirty = tuple(m.rank for m in full if answers[m.worker].dirty)
    needing = [m for m in plan.members if answers[m.worker].empty or m.rank in dirty]
    sources = [_source(layout, m, target, plan, answers, shards) for m in needing]
    clean = {m.rank for m in full if not answers[m.worker].dirty}
    problems = [p for s in sources if (p := _lost(layout, s, target, answers, shards, clean))]
    if problems and target == 0:
        return Verdict(setup_again=True)  # nothing is lost that set-up does not make again
    if problems:
        return Verdict(problem=problems[0], state_lost=True)
    return Verdict(
        target=target,
        sources=tuple(sources),
        dirty=dirty,
        holding=tuple(m.rank for m in full if answers[m.worker].holding),
    )


def _can_reach(answer: Answer, target: int) -> bool:
    return answer.committed == target or (answer.holding and answer.committed == target - 1)


def _source(
    layout: Layout,
    member: Member,
    target: int,
    plan: MigrationPlanned,
    answers: Mapping[str, Answer],
    shards: Shards,
) -> Source:
    """A leaver gives all there is to its joiner; else a replica and a buddy do."""
    leaver = next((m for m in plan.leavers if m.rank == member.rank), None)
    clean = {
        m.rank: m
        for m in plan.members
        if not answers[m.worker].empty and not answers[m.worker].dirty
    }
    held = sources(layout, shards, member.rank, clean)
    donors = [clean[rank] for rank in sorted({rank for each in held for rank in each.ranks})]
    # Who is at the target already serves before who must still run its optimizer.
    donors.sort(key=lambda m: (answers[m.worker].committed != target, m.rank))
    holder = leaver or extras_holder(member.rank, target, plan.members, answers)
    return Source(
        rank=member.rank,
        worker=member.worker,
        donors=tuple(m.worker for m in ([leaver] if leaver else []) + donors),
        extras_from=holder.worker if holder else None,
    )


def _lost(
    layout: Layout,
    source: Source,
    target: int,
    answers: Mapping[str, Answer],
    shards: Shards,
    clean: AbstractSet[int],
) -> str:
    """What of a rank's state no live member holds; empty when all of it is there."""
    if not source.donors:
        gone = lost(layout, shards, source.rank, clean - {source.rank})
        shard = in_words(layout, shards, source.rank, gone)
        return f"no live rank holds the shard of rank {source.rank} ({shard}): {NO_HOLDER}"
    if source.extras_from is None and answers[source.worker].empty:
        return (
            f"the own state of rank {source.rank} at step {target} is lost: "
            "its worker and both buddies are gone"
        )
    return ""


def extras_holder(
    rank: int, version: int, members: tuple[Member, ...], answers: Mapping[str, Answer]
) -> Member | None:
    """A member that keeps version `version` of the extras of `rank`, lowest rank first."""
    for member in members:
        answer = answers.get(member.worker)
        if answer and version in answer.extras.get(rank, ()):
            return member
    return None
