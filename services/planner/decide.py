"""Failures and standbys in, who replaces whom out.

Every generation has its only source here; a plan names all its members with their addresses,
so that nothing else needs to be known to carry it out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from trainmover.schemas.base import Event
from trainmover.schemas.events import (
    InterruptionCancelled,
    JobFailed,
    JobStalled,
    JobStarted,
    LayoutAssigned,
    MigrationPlanned,
    PoolExhausted,
    PoolReplenished,
    Replacement,
)
from trainmover.schemas.member import Member
from trainmover.services.contract import Inputs, Service
from trainmover.services.planner.choice import broken, first_members, member, replacements
from trainmover.services.planner.ending import NO_PROGRESS, STALLED, ending, failed
from trainmover.services.planner.moves import MAX_TRIES, move, refusals, urgent
from trainmover.services.planner.state import Phase, State, evolve

MAX_WORDS_CHARS = 4_000
"""A reason names every rank of a small loss and is cut for a large one."""

IMPORTS_S = 300.0
"""A job is not stalled while its agents import what its script needs, from a slow disk perhaps."""

UNBLOCKED_BY = (
    "a worker that registers: start one on any machine of this job, or wait for the fresh one "
    "that the agent of a live machine starts"
)


def decide(state: State, inputs: Inputs) -> Sequence[Event]:
    """The events that the stream lacks. `now_s` settles broken links and bounds stalls."""
    if state.submitted is None or state.over:
        return ()
    end = ending(state)
    if end is not None:
        return (end,)
    if not state.assignments:
        return tuple(_assign(state, inputs.now_s))
    recovery = tuple(_recover(state, inputs.now_s))
    return (*_replenished(state), *_started(state), *(recovery or _move(state)))


def _assign(state: State, now_s: float) -> Iterable[LayoutAssigned | JobFailed]:
    assert state.submitted is not None
    job = state.submitted
    members = first_members(state, now_s)
    if members:
        yield LayoutAssigned(job=job.job, run=job.run, members=members)
        return
    limit_s = job.stall_timeout_s if state.launched else max(job.stall_timeout_s, IMPORTS_S)
    if now_s - max(state.submitted_s, state.launched_s) > limit_s:
        need = f"{len(state.free)} of {job.layout.world_size} workers have registered"
        yield failed(state, STALLED, f"{need} within {limit_s:g} s (--stall-timeout)")


def _replenished(state: State) -> Iterable[PoolReplenished]:
    assert state.submitted is not None
    for worker in state.arrived:
        yield PoolReplenished(job=state.submitted.job, run=state.submitted.run, worker=worker)


def _started(state: State) -> Iterable[JobStarted]:
    """All members are set up, since set-up was begun for the last time."""
    assert state.submitted is not None
    ready = (state.ready.get(m.worker, 0) >= state.setup_since for m in state.latest.members)
    if not state.started and all(ready):
        yield JobStarted(job=state.submitted.job, run=state.submitted.run)


def _recover(state: State, now_s: float) -> Iterable[Event]:
    latest, members = state.latest, state.members
    leavers = [m for m in members if m.worker in state.unfit]
    if leavers:
        chosen = replacements(state, leavers)
        if len(chosen) < len(leavers):
            yield from _short(state, leavers, now_s)
        else:
            yield _plan(state, chosen, "; ".join(_loss(state, r) for r in chosen))
    elif latest.phase is Phase.ABORTED:
        assert latest.aborted is not None
        yield _try_again(state, f"generation {latest.generation}: {latest.aborted.reason}")
    elif members != latest.members:
        back = ", ".join(m.worker for m in members if m not in latest.members)
        yield _try_again(state, f"a joiner was lost before the switch: {back} takes its rank back")
    elif (link := broken(state, now_s)) is not None:
        chosen = replacements(state, [link.suspect]) if link.suspect is not None else ()
        if chosen:
            yield _plan(state, chosen, f"{link.reason}: {chosen[0].joiner} takes over")
        else:
            yield _try_again(state, link.reason)


def _move(state: State) -> Iterable[MigrationPlanned | PoolExhausted | InterruptionCancelled]:
    """One planned switch, of all announced interruptions whose ranks there are standbys for."""
    latest, pending = state.latest, state.pending
    if not state.started or latest.phase is not Phase.RUNNING:
        return
    if any(m.worker in state.unfit for m in latest.members):
        return  # standbys are for those that are lost
    found = move(replace(state, pending=None))
    if pending is not None and not urgent(state, found):
        return
    state = replace(state, pending=None)
    refused = [
        _cancelled(state, interruption.interruption, why) for interruption, why in refusals(state)
    ]
    if refused:
        yield from refused
        return
    if found.num_short:
        exhausted = _exhausted(state, len(found.leavers) + found.num_short)
        if exhausted.key() not in state.exhausted:
            yield exhausted
    if not found.leavers:
        return
    leavers = sorted(found.leavers.values(), key=lambda m: m.rank)
    chosen = replacements(state, leavers, found.joiners)
    why = "; ".join(f"{c.kind}: {c.reason}".removesuffix(": ") for c in found.causes)
    moves = ", ".join(f"rank {r.rank} moves from {r.leaver} to {r.joiner}" for r in chosen)
    plan = _plan(state, chosen, f"{moves} ({why})")
    yield plan.model_copy(update={"kind": "planned", "leavers": tuple(leavers)})


def _cancelled(state: State, interruption: str, reason: str) -> InterruptionCancelled:
    assert state.submitted is not None
    return InterruptionCancelled(
        job=state.submitted.job,
        run=state.submitted.run,
        interruption=interruption,
        reason=reason[:MAX_WORDS_CHARS],
    )


def _try_again(state: State, reason: str) -> MigrationPlanned | JobFailed:
    """The same members once more, as long as that may help."""
    if state.latest.tries < MAX_TRIES:
        return _plan(state, (), reason)
    tries = f"{MAX_TRIES} plans with the same workers failed in a row"
    return failed(state, NO_PROGRESS, f"{tries}; the last one: {reason}")


def _plan(state: State, chosen: Sequence[Replacement], reason: str) -> MigrationPlanned:
    """The next generation.

    Replacements of a plan that did not come to its end stand in the next one as well: whoever
    carries it out must know that these joiners hold no state yet.
    """
    assert state.submitted is not None
    latest, members = state.latest, state.members
    generation = state.generation + 1
    done = latest.phase is Phase.RUNNING
    new = {r.rank: r for r in chosen}
    here = {m.worker for m in members if m.rank not in new}
    kept = () if done else tuple(r for r in latest.replacements if r.joiner in here)
    all_of_them = tuple(sorted((*kept, *chosen), key=lambda r: r.rank))
    return MigrationPlanned(
        job=state.submitted.job,
        run=state.submitted.run,
        generation=generation,
        incident=f"g{generation}" if done else latest.incident,
        kind="crash" if all_of_them else "relink",
        replacements=all_of_them,
        members=tuple(
            member(m.rank, state.registered[new[m.rank].joiner]) if m.rank in new else m
            for m in members
        ),
        reason=reason[:MAX_WORDS_CHARS],
    )


def _loss(state: State, replacement: Replacement) -> str:
    rank, leaver, joiner = replacement.rank, replacement.leaver, replacement.joiner
    failure = state.failed.get(leaver)
    why = f"{failure.kind}: {failure.evidence}" if failure else "it did not do its part"
    return f"rank {rank} lost its worker {leaver} ({why}), {joiner} takes over"


def _short(
    state: State, leavers: Sequence[Member], now_s: float
) -> Iterable[PoolExhausted | JobStalled | JobFailed]:
    """Too few standbys: says so once, and gives up after the job's stall timeout."""
    assert state.submitted is not None
    job, run = state.submitted.job, state.submitted.run
    generation, num_free = state.latest.generation, len(state.free)
    lost = ", ".join(f"rank {m.rank} lost its worker {m.worker}" for m in leavers)
    standbys = "standby is" if num_free == 1 else "standbys are"
    free = f"only {num_free} {standbys} free" if num_free else "no standby is free"
    reason = f"{lost[:MAX_WORDS_CHARS]} and {free}"
    kept = dict.fromkeys(w.machine for w in state.spare if state.interruptions.drains(w.machine))
    back = "".join(f", or `trainmover undrain {machine}`" for machine in kept)
    since_s, timeout_s = state.stalled_since_s, state.submitted.stall_timeout_s
    if since_s is not None and now_s - since_s > timeout_s:
        yield failed(state, STALLED, f"{reason}, for {timeout_s:g} s (--stall-timeout)")
        return
    exhausted = _exhausted(state, len(leavers))
    stalled = JobStalled(
        job=job,
        run=run,
        generation=generation,
        reason=reason,
        unblocked_by=UNBLOCKED_BY + back,
    )
    if exhausted.key() not in state.exhausted:
        yield exhausted
    if stalled.key() not in state.stalled:
        yield stalled


def _exhausted(state: State, needed: int) -> PoolExhausted:
    assert state.submitted is not None
    return PoolExhausted(
        job=state.submitted.job,
        run=state.submitted.run,
        generation=state.latest.generation,
        needed=needed,
        free=len(state.free),
    )


SERVICE = Service(name="planner", initial=State(), evolve=evolve, decide=decide)
