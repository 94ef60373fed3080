"""A plan in, commands to runtimes and the migration's progress out. Pure.

The order is fixed by docs/protocol.md: collect, decide, obey, pull, switch, `switched` on
the stream (WAL), resume. A planned switch is prepared and decided before (`ahead`), then goes the
same way. Where a migration stands is what its last event says plus the latest
answers of its members, so a mover that restarts asks again and goes on.
"""

from collections.abc import Sequence

from trainmover.schemas.commands import (
    Collect,
    Drop,
    Resume,
    Retire,
    Stage,
    StandBy,
    Switch,
)
from trainmover.schemas.events import (
    JobSubmitted,
    LayoutAssigned,
    MigrationDecided,
    MigrationPlanned,
    MigrationSwitched,
)
from trainmover.schemas.member import digest
from trainmover.services.contract import Ask, Inputs, Output, Service
from trainmover.services.mover import ahead
from trainmover.services.mover.migration import Migration, abort, decision, stage_of
from trainmover.services.mover.state import State, evolve
from trainmover.services.mover.verdict import verdict

COLLECT_S = 5.0
"""How long a member may take to answer a collect: it only takes a lock (ALL: who does not answer
becomes a leaver of the next plan)."""
OBEY_S = 120.0
"""From the decision: a holder runs its optimizer to the end of the block, others are there."""
JOIN_S = 900.0
"""From the decision: a joiner may run `train` from the top for its rank, then pulls its state."""


def decide(state: State, inputs: Inputs) -> Sequence[Output]:
    if state.spec is None or state.layout is None:
        return ()
    if state.over:
        alive = [w for w in state.registered if w not in state.gone]
        return [Ask(worker, Retire(reason="the job is over")) for worker in alive]
    out: list[Output] = list(_standbys(state, state.spec))
    if state.plan is None:
        out += _first_setup(state, state.spec, state.layout, inputs)
    elif not state.closed:
        out += _migrate(state, state.spec, state.plan, inputs)
    return [*out, *_drops(state, inputs), *_releases(state)]


def _drops(state: State, inputs: Inputs) -> Sequence[Output]:
    """Everybody who may have heard of a planned switch that comes to nothing goes on."""
    workers = ahead.unaware(state, inputs)
    if state.dropped is None or not workers:
        return []
    command = Drop(generation=state.dropped.generation, reason="the planned switch was dropped")
    return [Ask(worker, command) for worker in workers]


def _releases(state: State) -> Sequence[Output]:
    """Who gave its rank away ends well; its agent starts a fresh standby."""
    command = Retire(reason="its rank was given to another worker")
    return [Ask(worker, command) for worker in sorted(state.released - state.gone)]


def _standbys(state: State, spec: JobSubmitted) -> Sequence[Output]:
    """Every worker that holds no rank warms up for each role class, by what ranks recorded.

    Not while a rank waits for a worker: who comes then gets it at once.
    """
    if not spec.warm_up or any(m.worker in state.gone for m in state.members):
        return []
    command = StandBy(layout=spec.layout, tapes=dict(state.tapes))
    return [
        Ask(worker, command)
        for worker in sorted(set(state.registered) - state.gone - state.held)
        if not state.wanted <= state.tried.get(worker, frozenset())
    ]


def _first_setup(
    state: State, spec: JobSubmitted, layout: LayoutAssigned, inputs: Inputs
) -> Sequence[Output]:
    command = Switch(
        generation=1,
        layout=spec.layout,
        members=layout.members,
        placement=state.placement,
        joiners=tuple(m.rank for m in layout.members),
        target=0,
        setup=True,
    )
    return [
        Ask(m.worker, command)
        for m in layout.members
        if stage_of(inputs.answers.get(m.worker), 1) < Stage.SWITCHED
        and m.worker not in state.ready
    ]


# ---- a migration


def _migrate(
    state: State, spec: JobSubmitted, plan: MigrationPlanned, inputs: Inputs
) -> Sequence[Output]:
    migration = Migration(
        spec=spec,
        plan=plan,
        placement=state.placement,
        settled=state.settled,
        answers={
            m.worker: answer
            for m in (*plan.members, *plan.leavers)
            if (answer := inputs.answers.get(m.worker)) is not None
            and answer.about == plan.generation
            and answer.stage >= Stage.COLLECTED
        },
        shards=state.shards,
        gone=state.gone,
        tapes=state.tapes,
    )
    if state.switched:
        return _resume(migration, state.switched)
    if state.decided is None and plan.kind == "planned":
        return ahead.decide(migration, state, inputs)
    if state.decided is None:
        return _collect(migration, state, inputs)
    if plan.leavers and (silent := _silent(migration)):
        return _late(migration, state, inputs) or silent
    return _refused(migration) or _late(migration, state, inputs) or _move(migration, state.decided)


def _collect(migration: Migration, state: State, inputs: Inputs) -> Sequence[Output]:
    """ALL: who does not answer by the deadline is a leaver of the next plan, never outvoted."""
    plan = migration.plan
    silent = _silent(migration)
    if not silent:
        layout, shards = migration.spec.layout, migration.shards
        return [decision(plan, verdict(layout, plan, migration.answers, shards))]
    if inputs.now_s > max(state.planned_s, inputs.up_since_s) + COLLECT_S:
        names = tuple(ask.worker for ask in silent)
        return [abort(plan, f"no answer to collect within {COLLECT_S:g} s", names)]
    return silent


def _silent(migration: Migration) -> list[Ask]:
    """Those whose promise for this plan is not here are asked for it."""
    plan = migration.plan
    command = Collect(
        generation=plan.generation, assignment=digest(plan.members), incident=plan.incident
    )
    return [Ask(m.worker, command) for m in migration.asked if m.worker not in migration.answers]


def _refused(migration: Migration) -> Sequence[Output]:
    """A member says that it cannot: a new plan is better than waiting for the deadline."""
    for member in migration.asked:
        answer = migration.answers.get(member.worker)
        if answer and answer.refused:
            reason = f"rank {member.rank} ({member.worker}): {answer.refused}"
            return [abort(migration.plan, reason)]
    return []


def _late(migration: Migration, state: State, inputs: Inputs) -> Sequence[Output]:
    """A deadline passed: the member that waits for nobody and has not done its part leaves."""
    plan = migration.plan
    joiners = {r.joiner for r in plan.replacements}
    since = inputs.now_s - max(state.decided_s, inputs.up_since_s)
    late = tuple(
        m.worker
        for m in migration.asked
        if migration.stage(m) < Stage.OBEYED and since > (JOIN_S if m.worker in joiners else OBEY_S)
    )
    if late:
        return [abort(plan, "did not reach the decided step in time", late)]
    if since > JOIN_S + OBEY_S:
        return [abort(plan, "state and links were not in place in time")]
    return []


def _move(migration: Migration, decided: MigrationDecided) -> Sequence[Output]:
    """Obey, pull, switch: each member is told the next piece as soon as it can do it."""
    out = migration.tell_decision(decided)
    if decided.setup_again:
        if out:
            return out
    else:
        out += migration.tell_pull(decided)
        if migration.any_below(Stage.RESTORED):
            return out
        if different := migration.different_state():
            return [different]
    return migration.tell_switch(decided) or [migration.switched(decided)]


def _resume(migration: Migration, switched: MigrationSwitched) -> Sequence[Output]:
    """WAL: only after `switched` is on the stream, and from then on only forward."""
    plan, answers = migration.plan, migration.answers
    command = Resume(generation=plan.generation, target=switched.target, total=switched.total)
    waiting = [
        m
        for m in plan.members
        if (a := answers.get(m.worker)) is None
        or a.running != plan.generation
        or not (a.committed > switched.target or a.done)
    ]
    if waiting:
        return [Ask(m.worker, command) for m in waiting]
    return [migration.completed()]


SERVICE: Service[State] = Service(name="mover", initial=State(), evolve=evolve, decide=decide)
