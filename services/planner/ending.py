"""How a job ends: completed, or failed with the reason and the exit code."""

from collections import Counter

from trainmover.schemas.digest import of_job
from trainmover.schemas.events import JobCompleted, JobFailed, UserError
from trainmover.schemas.shards import NO_HOLDER, holding, in_words, lost, sources
from trainmover.services.planner.state import Phase, State

USER_CODE = 1
STALLED = 3
STATE_LOST = 4
NO_PROGRESS = 5
TERMINATED = 143
"""128 and the number of SIGTERM, as a shell has it."""

MAX_NEVER_RAN = 5
"""So many workers that ended before they registered are enough to know it of a large job too, if
nobody registered; if others did, in a small one."""
MAX_MESSAGE_CHARS = 1_000
MAX_TRACEBACK_CHARS = 12_000
"""The end of a traceback says most."""
MAX_REASON_CHARS = 16_000
"""Inside what the text of an event may hold."""


def ending(state: State) -> JobCompleted | JobFailed | None:
    """The end that the stream leads to, if it does."""
    return (
        _completed(state)
        or _preempted(state)
        or _user_code(state)
        or _never_ran(state)
        or _state_lost(state)
        or _too_many_failures(state)
        or _no_progress(state)
        or _joiners_fail(state)
    )


def failed(state: State, exit_code: int, reason: str) -> JobFailed:
    """`job.failed`; `reason` is cut to what an event may hold."""
    assert state.submitted is not None
    return JobFailed(
        job=state.submitted.job,
        run=state.submitted.run,
        reason=reason[:MAX_REASON_CHARS],
        exit_code=exit_code,
    )


def _completed(state: State) -> JobCompleted | JobFailed | None:
    """All members of one generation have finished.

    An older one counts too: a worker that died after it had finished may have led to a plan
    before the last of the others said that it had finished as well.
    """
    assert state.submitted is not None
    if not state.finished:
        return None
    for assignment in reversed(state.assignments):
        finished = [
            event
            for member in assignment.members
            if (event := state.finished.get(member.worker)) is not None
        ]
        if len(finished) < len(assignment.members):
            continue
        counts = sorted({event.committed for event in finished})
        if len(counts) > 1:
            reason = f"ranks finished with different numbers of committed steps: {counts}"
            return failed(state, STATE_LOST, f"{reason}; this is a bug in trainmover")
        return JobCompleted(
            job=state.submitted.job,
            run=state.submitted.run,
            completed_steps=counts[0],
            state_digest=of_job(event.digest for event in finished),
        )
    return None


def _preempted(state: State) -> JobFailed | None:
    return failed(state, TERMINATED, state.preempted) if state.preempted else None


def _user_code(state: State) -> JobFailed | None:
    """An exception that a fresh worker would only raise again (architecture.md, exit codes)."""
    assert state.submitted is not None
    world_size = state.submitted.layout.world_size
    told: dict[tuple[str, int], Counter[int | None]] = {}
    for error in state.errors:
        told.setdefault((error.exception, error.step), Counter())[error.rank] += 1
    for error in state.errors:
        ranks = told[error.exception, error.step]
        if error.committed == 0 and state.progress == 0:
            return failed(state, USER_CODE, _words(error, "before the first committed step"))
        if 2 * len(ranks) > world_size:
            why = f"like {len(ranks)} of {world_size} ranks"
            return failed(state, USER_CODE, _words(error, why))
        if ranks[error.rank] > 1:
            return failed(state, USER_CODE, _words(error, "again on a fresh worker"))
    return None


def _words(error: UserError, why: str) -> str:
    who = "a worker" if error.rank is None else f"rank {error.rank}"
    head = f"{who} raised {error.exception} in step {error.step}, {why}"
    message = error.message[:MAX_MESSAGE_CHARS]
    return f"{head}: {message}\n{error.traceback[-MAX_TRACEBACK_CHARS:]}"


def _never_ran(state: State) -> JobFailed | None:
    """Workers end before they register, most often before `trainmover.run`; so would others."""
    assert state.submitted is not None
    world_size = state.submitted.layout.world_size
    early = [w for w in state.failed if w in state.launched and w not in state.registered]
    enough = (max if state.registered else min)(world_size, MAX_NEVER_RAN)
    if state.assignments or len(early) < enough:
        return None
    return failed(
        state,
        USER_CODE,
        f"{len(early)} of {len(state.launched)} workers ended before they registered"
        f" ({state.failed[early[0]].evidence}): their output says why. A script that ends without"
        " an error lacks the call `trainmover.run(train)` at its end",
    )


def _state_lost(state: State) -> JobFailed | None:
    """The mover found no copy; or every replica of a shard is gone, and no standby would help."""
    if not state.assignments:
        return None
    assert state.submitted is not None
    latest, layout = state.latest, state.submitted.layout
    if latest.aborted is not None and latest.aborted.state_lost:
        return failed(state, STATE_LOST, latest.aborted.reason)
    gone = {m.rank: state.failed[m.worker] for m in state.members if m.worker in state.failed}
    for rank, failure in gone.items():
        left = set(range(layout.world_size)) - gone.keys()
        if state.started and not sources(layout, state.shards, rank, left):
            names = lost(layout, state.shards, rank, left)
            shard = in_words(layout, state.shards, rank, names)
            holders = holding(layout, state.shards, rank, names)
            who = f"rank{'s' * (len(holders) > 1)} {', '.join(map(str, holders))}"
            why = f"held every copy of the state ({shard}) and failed: {failure.evidence}"
            return failed(state, STATE_LOST, f"{who} {why[: MAX_REASON_CHARS // 2]}; {NO_HOLDER}")
    return None


def _too_many_failures(state: State) -> JobFailed | None:
    assert state.submitted is not None
    limit = state.submitted.max_failures
    num_failures = len(state.unfit & state.ranks.keys())
    if limit is None or num_failures <= limit:
        return None
    reason = f"{num_failures} workers that held a rank failed, at most {limit} may (--max-failures)"
    return failed(state, NO_PROGRESS, reason)


def _no_progress(state: State) -> JobFailed | None:
    """`max_incidents` interruptions ended, and each found the job where the one before left it.

    Planned ones do not count: they find it where they like.
    """
    assert state.submitted is not None
    limit = state.submitted.max_incidents
    ended = {
        a.incident
        for a in state.assignments[1:]
        if a.phase in (Phase.RUNNING, Phase.ABORTED) and not a.leavers
    }
    targets = Counter(target for incident, target in state.targets.items() if incident in ended)
    for target, num_incidents in targets.items():
        if num_incidents >= limit:
            reason = f"{num_incidents} incidents in a row at {target} committed steps, no progress"
            return failed(state, NO_PROGRESS, f"{reason} (--max-incidents)")
    return None


def _joiners_fail(state: State) -> JobFailed | None:
    """Whoever takes over a rank fails before the job has gone on: so would the next."""
    assert state.submitted is not None
    limit = state.submitted.max_incidents
    latest = state.assignments[-1].incident if state.assignments else ""
    joiners = {
        replacement.joiner: replacement.rank
        for assignment in state.assignments
        if latest and assignment.incident == latest
        for replacement in assignment.replacements
    }
    lost = Counter(rank for joiner, rank in joiners.items() if joiner in state.unfit)
    for rank, count in lost.items():
        if count >= limit:
            reason = f"{count} workers in a row took over rank {rank} and failed before a step"
            return failed(state, NO_PROGRESS, f"{reason} was committed (--max-incidents)")
    return None
