"""A planned switch up to its decision: joiners are made ready, then every rank stops. Pure.

Training goes on until the ranks stand frozen at one boundary. Until `migration.decided` is on the
stream (WAL) the plan can be dropped, and all go on where they stand (docs/design/012).
"""

from collections.abc import Sequence
from math import inf

from trainmover.schemas.commands import Answer, Freeze, Prepare
from trainmover.schemas.events import MigrationPrepared
from trainmover.services.contract import Ask, Inputs, Output
from trainmover.services.mover.migration import Migration, abort, decision
from trainmover.services.mover.state import State
from trainmover.services.mover.verdict import verdict

PREPARE_S = 900.0
"""From the plan: a joiner may run `train` from the top for its rank."""
FREEZE_S = 600.0
"""From then on: every rank comes to the end of a step."""
HASTE_S = 5.0
"""So long before the leavers must be gone their joiners are not waited for any more: the ranks
stop, and a joiner is set up while its leaver still holds what it needs."""


def decide(migration: Migration, state: State, inputs: Inputs) -> Sequence[Output]:
    """What brings the plan on, or drops it."""
    plan, answers = migration.plan, inputs.answers
    joiners = {r.joiner for r in plan.replacements}
    dead = sorted({m.worker for m in (*plan.members, *plan.leavers)} & state.gone)
    if dead:
        return [abort(plan, f"{', '.join(dead)} ended before the switch", tuple(dead))]
    asked = [state.interruptions.of(m.worker, m.machine) for m in plan.leavers]
    if not all(asked):
        return [abort(plan, "its interruption was cancelled")]
    unready = [
        m
        for m in plan.members
        if m.worker in joiners
        and ((a := answers.get(m.worker)) is None or a.prepared != plan.generation)
    ]
    if state.prepared_s is None:
        names = tuple(m.worker for m in unready)
        deadlines_s = [i.deadline for some in asked for i in some if i.deadline is not None]
        if names and inputs.now_s < min(deadlines_s, default=inf) - HASTE_S:
            return _prepare(migration, state, inputs, names)
        return [
            MigrationPrepared(
                job=plan.job,
                run=plan.run,
                generation=plan.generation,
                incident=plan.incident,
                unready=names,
            )
        ]
    return _freeze(migration, state.prepared_s, state, inputs, joiners)


def _prepare(
    migration: Migration, state: State, inputs: Inputs, unready: Sequence[str]
) -> Sequence[Output]:
    plan = migration.plan
    for worker in unready:
        answer = inputs.answers.get(worker)
        if answer is not None and answer.prepare_error:
            return [abort(plan, f"{worker} cannot be prepared: {answer.prepare_error}", (worker,))]
    if inputs.now_s > max(state.planned_s, inputs.up_since_s) + PREPARE_S:
        return [abort(plan, f"not prepared within {PREPARE_S:g} s", tuple(unready))]
    command = Prepare(
        generation=plan.generation,
        layout=migration.spec.layout,
        members=plan.members,
        placement=migration.placement,
        joiners=tuple(r.rank for r in plan.replacements),
        tapes=dict(migration.tapes),
    )
    return [Ask(worker, command) for worker in unready]


def _freeze(
    migration: Migration, prepared_s: float, state: State, inputs: Inputs, joiners: set[str]
) -> Sequence[Output]:
    """Who may still stop for a plan before this one is told of its end first (`unaware`)."""
    plan, late = migration.plan, unaware(state, inputs)
    holders = [m.worker for m in migration.asked if m.worker not in joiners]
    answers = {m.worker: a for m in migration.asked if (a := inputs.answers.get(m.worker))}
    moving = [w for w in holders if (a := answers.get(w)) is None or a.frozen != plan.generation]
    if any(a.done for a in answers.values()):
        return [abort(plan, "the job ends before the switch")]
    if moving:
        if inputs.now_s > max(prepared_s, inputs.up_since_s) + FREEZE_S:
            return [abort(plan, f"{', '.join(moving)} did not stop within {FREEZE_S:g} s")]
        command = Freeze(generation=plan.generation)
        return [Ask(worker, command) for worker in moving if worker not in late]
    if len(answers) < len(migration.asked):  # a mover that came later asks the joiners as well
        missing = [m.worker for m in migration.asked if m.worker not in answers]
        return [Ask(worker, Freeze(generation=plan.generation)) for worker in missing]
    found = verdict(migration.spec.layout, plan, answers, migration.shards)
    return [abort(plan, found.problem) if found.problem else decision(plan, found)]


def unaware(state: State, inputs: Inputs) -> list[str]:
    """Who may have heard of a planned switch that came to nothing, and has not said it knows."""
    if state.dropped is None:
        return []
    workers = dict.fromkeys(m.worker for m in (*state.dropped.members, *state.dropped.leavers))
    return [
        worker
        for worker in workers
        if worker not in state.gone
        and ((a := inputs.answers.get(worker)) is None or not _past(a, state.dropped.generation))
    ]


def _past(answer: Answer, generation: int) -> bool:
    return max(answer.dropped, answer.promised) >= generation
