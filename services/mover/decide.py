"""A plan in, commands to runtimes and the migration's progress out. Pure.

The order is fixed by docs/design/commit.md: collect, decide, obey, pull, switch, `switched` on
the stream (WAL), resume. Where a migration stands is what its last event says plus the latest
answers of its members, so a mover that restarts asks again and goes on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainmover.schemas.commands import (
    Answer,
    Collect,
    Decided,
    Pull,
    Resume,
    Retire,
    Stage,
    StandBy,
    Switch,
)
from trainmover.schemas.events import (
    JobCompleted,
    JobFailed,
    JobSubmitted,
    LayoutAssigned,
    MigrationAborted,
    MigrationCompleted,
    MigrationDecided,
    MigrationPlanned,
    MigrationSwitched,
    RankReady,
    Restored,
    StandbyWarmed,
    WorkerExited,
    WorkerFailed,
    WorkerRegistered,
)
from trainmover.schemas.member import Member, digest
from trainmover.schemas.recorded import Recorded
from trainmover.services.contract import Ask, Inputs, Output, Service
from trainmover.services.mover.verdict import Verdict, extras_holder, verdict

COLLECT_S = 5.0
"""How long a member may take to answer a collect: it only takes a lock (ALL: who does not answer
becomes a leaver of the next plan)."""
OBEY_S = 120.0
"""From the decision: a holder runs its optimizer to the end of the block, others are there."""
JOIN_S = 900.0
"""From the decision: a joiner may run `train` from the top for its rank, then pulls its state."""


@dataclass(frozen=True, slots=True)
class State:
    spec: JobSubmitted | None = None
    layout: LayoutAssigned | None = None
    plan: MigrationPlanned | None = None
    planned_s: float = 0.0
    decided: MigrationDecided | None = None
    decided_s: float = 0.0
    switched: MigrationSwitched | None = None
    closed: bool = False
    """The latest plan was completed or aborted."""
    over: bool = False
    registered: tuple[str, ...] = ()
    gone: frozenset[str] = frozenset()
    settled: frozenset[str] = frozenset()
    """Members of the last assignment that ran."""
    held: frozenset[str] = frozenset()
    """Workers that ever held a rank."""
    warmed: frozenset[str] = frozenset()
    ready: Mapping[str, int] = field(default_factory=dict)
    """Worker -> highest generation it was rank.ready in."""

    @property
    def members(self) -> tuple[Member, ...]:
        if self.plan:
            return self.plan.members
        return self.layout.members if self.layout else ()

    @property
    def placement(self) -> tuple[str, ...]:
        """Machine of each rank in generation 1."""
        return tuple(m.machine for m in self.layout.members) if self.layout else ()


def evolve(state: State, recorded: Recorded) -> State:
    match recorded.event:
        case JobSubmitted() as spec:
            return replace(state, spec=spec)
        case LayoutAssigned() as layout:
            workers = frozenset(m.worker for m in layout.members)
            return replace(state, layout=layout, settled=workers, held=state.held | workers)
        case WorkerRegistered(worker=worker):
            return replace(state, registered=(*state.registered, worker))
        case WorkerExited(exits=exits):
            return replace(state, gone=state.gone | {e.worker for e in exits})
        case WorkerFailed(workers=workers):
            return replace(state, gone=state.gone | set(workers))
        case StandbyWarmed(worker=worker):
            return replace(state, warmed=state.warmed | {worker})
        case RankReady(worker=worker, generation=generation):
            return replace(state, ready={**state.ready, worker: generation})
        case MigrationPlanned() as plan:
            return replace(
                state,
                plan=plan,
                planned_s=recorded.time_s,
                decided=None,
                switched=None,
                closed=False,
                held=state.held | {m.worker for m in plan.members},
            )
        case MigrationDecided() as decided if _current(state, decided.generation):
            return replace(state, decided=decided, decided_s=recorded.time_s)
        case MigrationSwitched() as switched if _current(state, switched.generation):
            return replace(state, switched=switched)
        case MigrationCompleted(generation=g) if _current(state, g):
            workers = frozenset(m.worker for m in state.members)
            return replace(state, closed=True, settled=workers)
        case MigrationAborted(generation=g) if _current(state, g):
            return replace(state, closed=True)
        case JobCompleted() | JobFailed():
            return replace(state, over=True)
        case _:
            return state


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
    return out


def _current(state: State, generation: int) -> bool:
    return state.plan is not None and state.plan.generation == generation


def _standbys(state: State, spec: JobSubmitted) -> Sequence[Output]:
    """Every worker that holds no rank warms up for the rank in the middle of the layout."""
    idle = set(state.registered) - state.gone - state.held - state.warmed
    rank = spec.layout.world_size // 2
    return [Ask(worker, StandBy(layout=spec.layout, rank=rank)) for worker in sorted(idle)]


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
    stages = _stages(layout.members, inputs, 1)
    return [
        Ask(m.worker, command)
        for m in layout.members
        if stages[m.worker] < Stage.SWITCHED and m.worker not in state.ready
    ]


# ---- a migration


def _migrate(
    state: State, spec: JobSubmitted, plan: MigrationPlanned, inputs: Inputs
) -> Sequence[Output]:
    if state.switched:
        return _resume(state, plan, state.switched, inputs)
    if state.decided is None:
        return _collect(state, spec, plan, inputs)
    if late := _refused(plan, inputs) or _late(state, plan, inputs):
        return late
    if state.decided.setup_again:
        return _set_up_again(state, spec, plan, state.decided, inputs)
    return _move(state, spec, plan, state.decided, inputs)


def _collect(
    state: State, spec: JobSubmitted, plan: MigrationPlanned, inputs: Inputs
) -> Sequence[Output]:
    answers = _answers(plan, inputs)
    silent = [m for m in plan.members if m.worker not in answers]
    if not silent:
        return [_verdict_event(plan, verdict(spec.layout, plan, answers))]
    if inputs.now_s > max(state.planned_s, inputs.up_since_s) + COLLECT_S:
        names = tuple(m.worker for m in silent)
        return [_abort(plan, f"no answer to collect within {COLLECT_S:g} s", names)]
    command = Collect(generation=plan.generation, assignment=digest(plan.members))
    return [Ask(m.worker, command) for m in silent]


def _verdict_event(plan: MigrationPlanned, found: Verdict) -> MigrationDecided | MigrationAborted:
    if found.problem:
        return _abort(plan, found.problem, state_lost=found.state_lost)
    return MigrationDecided(
        job=plan.job,
        run=plan.run,
        generation=plan.generation,
        incident=plan.incident,
        target=found.target,
        setup_again=found.setup_again,
        sources=found.sources,
        dirty=found.dirty,
        holding=found.holding,
    )


def _refused(plan: MigrationPlanned, inputs: Inputs) -> Sequence[Output]:
    """A member says that it cannot: a new plan is better than waiting for the deadline."""
    for member in plan.members:
        answer = _answers(plan, inputs).get(member.worker)
        if answer and answer.refused:
            return [_abort(plan, f"rank {member.rank} ({member.worker}): {answer.refused}")]
    return []


def _late(state: State, plan: MigrationPlanned, inputs: Inputs) -> Sequence[Output]:
    """A deadline passed: the member that waits for nobody and has not done its part leaves."""
    joiners = {r.joiner for r in plan.replacements}
    since = inputs.now_s - max(state.decided_s, inputs.up_since_s)
    stages = _stages(plan.members, inputs, plan.generation)
    late = tuple(
        m.worker
        for m in plan.members
        if stages[m.worker] < Stage.OBEYED and since > (JOIN_S if m.worker in joiners else OBEY_S)
    )
    if late:
        return [_abort(plan, "did not reach the decided step in time", late)]
    if since > JOIN_S + OBEY_S:
        return [_abort(plan, "state and links were not in place in time", ())]
    return []


def _set_up_again(
    state: State,
    spec: JobSubmitted,
    plan: MigrationPlanned,
    decided: MigrationDecided,
    inputs: Inputs,
) -> Sequence[Output]:
    stages = _stages(plan.members, inputs, plan.generation)
    if any(stage < Stage.OBEYED for stage in stages.values()):
        return _tell_decision(state, spec, plan, decided, stages)
    if any(stage < Stage.SWITCHED for stage in stages.values()):
        return _tell_switch(state, spec, plan, decided, stages)
    return [_switched(plan, decided, _answers(plan, inputs))]


def _move(
    state: State,
    spec: JobSubmitted,
    plan: MigrationPlanned,
    decided: MigrationDecided,
    inputs: Inputs,
) -> Sequence[Output]:
    answers = _answers(plan, inputs)
    stages = _stages(plan.members, inputs, plan.generation)
    out: list[Output] = list(_tell_decision(state, spec, plan, decided, stages))
    out += _pulls(spec, plan, decided, answers)
    if any(stage < Stage.RESTORED for stage in stages.values()):
        return out
    for member in plan.members:
        answer = answers[member.worker]
        if answer.donor and answer.digest != answer.donor_digest:
            reason = (
                f"rank {member.rank}: the state that {member.worker} has differs from what its "
                f"donor {answer.donor} holds (xxh3 {answer.digest} and {answer.donor_digest})"
            )
            return [_abort(plan, reason, (member.worker,))]
    if any(stage < Stage.SWITCHED for stage in stages.values()):
        return _tell_switch(state, spec, plan, decided, stages)
    return [_switched(plan, decided, answers)]


def _tell_decision(
    state: State,
    spec: JobSubmitted,
    plan: MigrationPlanned,
    decided: MigrationDecided,
    stages: Mapping[str, Stage],
) -> list[Output]:
    command = Decided(
        generation=plan.generation,
        layout=spec.layout,
        members=plan.members,
        placement=state.placement,
        target=decided.target,
        setup_again=decided.setup_again,
    )
    return [Ask(m.worker, command) for m in plan.members if stages[m.worker] < Stage.OBEYED]


def _tell_switch(
    state: State,
    spec: JobSubmitted,
    plan: MigrationPlanned,
    decided: MigrationDecided,
    stages: Mapping[str, Stage],
) -> list[Output]:
    command = Switch(
        generation=plan.generation,
        layout=spec.layout,
        members=plan.members,
        placement=state.placement,
        joiners=tuple(
            m.rank for m in plan.members if decided.setup_again or m.worker not in state.settled
        ),
        target=decided.target,
        setup=decided.setup_again,
    )
    return [Ask(m.worker, command) for m in plan.members if stages[m.worker] < Stage.SWITCHED]


def _pulls(
    spec: JobSubmitted,
    plan: MigrationPlanned,
    decided: MigrationDecided,
    answers: Mapping[str, Answer],
) -> list[Output]:
    """DIRTYACK: only a member that acknowledged the decision clean is a donor."""
    by_rank = {m.rank: m for m in plan.members}
    clean = {m.rank for m in plan.members if _stage(answers, m.worker) >= Stage.RESTORED}
    out: list[Output] = []
    for m in plan.members:
        if _stage(answers, m.worker) != Stage.OBEYED:
            continue
        donors = [r for r in spec.layout.replicas(m.rank) if r in clean and r != m.rank]
        holder = extras_holder(m.rank, decided.target, plan.members, answers)
        if donors:
            # Several joiners of one shard spread over its replicas.
            donor = by_rank[donors[m.rank % len(donors)]]
            command = Pull(
                generation=plan.generation,
                target=decided.target,
                donor=donor,
                extras_from=holder,
            )
            out.append(Ask(m.worker, command))
    if (
        not out
        and not clean
        and all(_stage(answers, m.worker) >= Stage.OBEYED for m in plan.members)
    ):
        reason = "no rank acknowledged the decided step clean: nothing holds a sound copy"
        return [_abort(plan, reason, state_lost=True)]
    return out


def _switched(
    plan: MigrationPlanned, decided: MigrationDecided, answers: Mapping[str, Answer]
) -> MigrationSwitched:
    restored = [
        Restored(
            rank=m.rank,
            worker=m.worker,
            donor=answer.donor,
            num_bytes=answer.num_bytes,
            seconds=answer.pull_s,
            digest=answer.digest,
        )
        for m in plan.members
        if (answer := answers[m.worker]).donor
    ]
    return MigrationSwitched(
        job=plan.job,
        run=plan.run,
        generation=plan.generation,
        incident=plan.incident,
        target=decided.target,
        restored=tuple(restored),
        links={str(m.rank): answers[m.worker].links for m in plan.members},
    )


def _resume(
    state: State, plan: MigrationPlanned, switched: MigrationSwitched, inputs: Inputs
) -> Sequence[Output]:
    command = Resume(generation=plan.generation, target=switched.target)
    answers = _answers(plan, inputs)
    waiting = [
        m
        for m in plan.members
        if (a := answers.get(m.worker)) is None
        or a.running != plan.generation
        or not (a.committed > switched.target or a.done)
    ]
    if waiting:
        return [Ask(m.worker, command) for m in waiting]
    return [
        MigrationCompleted(
            job=plan.job,
            run=plan.run,
            generation=plan.generation,
            incident=plan.incident,
            committed=min(answers[m.worker].committed for m in plan.members),
        )
    ]


# ---- answers


def _answers(plan: MigrationPlanned, inputs: Inputs) -> dict[str, Answer]:
    """Answers about this plan's generation that promise it."""
    return {
        m.worker: answer
        for m in plan.members
        if (answer := inputs.answers.get(m.worker)) is not None
        and answer.about == plan.generation
        and answer.stage >= Stage.COLLECTED
    }


def _stages(members: tuple[Member, ...], inputs: Inputs, generation: int) -> dict[str, Stage]:
    about = {w: a for w, a in inputs.answers.items() if a.about == generation}
    return {m.worker: _stage(about, m.worker) for m in members}


def _stage(answers: Mapping[str, Answer], worker: str) -> Stage:
    answer = answers.get(worker)
    return answer.stage if answer else Stage.NONE


def _abort(
    plan: MigrationPlanned, reason: str, missing: tuple[str, ...] = (), *, state_lost: bool = False
) -> MigrationAborted:
    return MigrationAborted(
        job=plan.job,
        run=plan.run,
        generation=plan.generation,
        incident=plan.incident,
        reason=reason,
        missing=missing,
        state_lost=state_lost,
    )


SERVICE: Service[State] = Service(name="mover", initial=State(), evolve=evolve, decide=decide)
