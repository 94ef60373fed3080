"""What the mover knows: a fold over the job's stream."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from trainmover.schemas.events import (
    InterruptionAnnounced,
    InterruptionCancelled,
    JobCompleted,
    JobFailed,
    JobSubmitted,
    LayoutAssigned,
    MigrationAborted,
    MigrationCompleted,
    MigrationDecided,
    MigrationPlanned,
    MigrationPrepared,
    MigrationSwitched,
    RankReady,
    StandbyMismatched,
    StandbyWarmed,
    WorkerExited,
    WorkerFailed,
    WorkerRegistered,
)
from trainmover.schemas.interruptions import Interruptions
from trainmover.schemas.member import Member
from trainmover.schemas.recorded import Recorded

Warm = tuple[str, str]
"""Role class and name of the tape."""


@dataclass(frozen=True, slots=True)
class State:
    spec: JobSubmitted | None = None
    layout: LayoutAssigned | None = None
    plan: MigrationPlanned | None = None
    planned_s: float = 0.0
    interruptions: Interruptions = field(default_factory=Interruptions)
    prepared_s: float | None = None
    """When the joiners of a planned switch stood ready."""
    decided: MigrationDecided | None = None
    decided_s: float = 0.0
    switched: MigrationSwitched | None = None
    closed: bool = False
    """The latest plan was completed or aborted."""
    dropped: MigrationPlanned | None = None
    """The last planned switch that came to nothing before it was decided."""
    released: frozenset[str] = frozenset()
    """Workers that are in no rank any more and live: they are to go."""
    over: bool = False
    registered: tuple[str, ...] = ()
    gone: frozenset[str] = frozenset()
    settled: frozenset[str] = frozenset()
    """Members of the last assignment that ran."""
    held: frozenset[str] = frozenset()
    """Workers that ever held a rank."""
    tried: Mapping[str, frozenset[Warm]] = field(default_factory=dict)
    """Standby -> what it has warmed up for, or could not."""
    setup_since: int = 1
    """Generation in which set-up was begun for the last time."""
    role_classes: Mapping[int, str] = field(default_factory=dict)
    """Rank -> role class, of the ranks that were set up since then."""
    tapes: Mapping[str, str] = field(default_factory=dict)
    """Role class -> name of what was recorded for it in that set-up."""
    ready: Mapping[str, int] = field(default_factory=dict)
    """Worker -> highest generation it was rank.ready in."""
    shards: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """Rank -> tracked name -> shard key."""

    @property
    def members(self) -> tuple[Member, ...]:
        if self.plan:
            return self.plan.members
        return self.layout.members if self.layout else ()

    @property
    def placement(self) -> tuple[str, ...]:
        """Machine of each rank in generation 1."""
        return tuple(m.machine for m in self.layout.members) if self.layout else ()

    @property
    def wanted(self) -> frozenset[Warm]:
        """What a standby is to be warm for; nothing until every rank was set up."""
        if self.spec is None or len(self.role_classes) < self.spec.layout.world_size:
            return frozenset()
        return frozenset((c, self.tapes.get(c, "")) for c in self.role_classes.values())


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
        case StandbyWarmed() | StandbyMismatched() as event:
            tried = state.tried.get(event.worker, frozenset()) | {(event.role_class, event.tape)}
            return replace(state, tried={**state.tried, event.worker: tried})
        case RankReady() as ready:
            return _ready(state, ready)
        case InterruptionAnnounced() | InterruptionCancelled() as event:
            return replace(state, interruptions=state.interruptions.after(event))
        case MigrationPlanned() as plan:
            return _planned(state, plan, recorded.time_s)
        case MigrationPrepared(generation=g) if _current(state, g):
            return replace(state, prepared_s=recorded.time_s)
        case MigrationDecided() as decided if _current(state, decided.generation):
            if state.closed:
                return state  # a doubled mover dropped the plan first
            state = replace(state, decided=decided, decided_s=recorded.time_s)
            if not decided.setup_again:
                return state
            return replace(state, setup_since=decided.generation, role_classes={}, tapes={})
        case MigrationSwitched() as switched if _current(state, switched.generation):
            given = {m.worker for m in state.plan.leavers} if state.plan else set()
            return replace(state, switched=switched, released=state.released | given)
        case MigrationCompleted(generation=g) if _current(state, g):
            workers = frozenset(m.worker for m in state.members)
            return replace(state, closed=True, settled=workers)
        case MigrationAborted(generation=g, missing=missing) if _current(state, g):
            after = replace(_dropped(state), closed=True)
            if after.dropped is None or after.dropped is state.dropped:
                return after
            # A joiner that could not be prepared is of no use; its agent starts a fresh one.
            idle = set(missing) & {r.joiner for r in after.dropped.replacements}
            return replace(after, released=after.released | idle)
        case JobCompleted() | JobFailed():
            return replace(state, over=True)
        case _:
            return state


def _ready(state: State, ready: RankReady) -> State:
    state = replace(
        state,
        ready={**state.ready, ready.worker: ready.generation},
        shards={**state.shards, ready.rank: ready.shards},
    )
    if ready.generation < state.setup_since:
        return state
    recorded = {ready.role_class: ready.tape} if ready.tape else {}
    return replace(
        state,
        role_classes={**state.role_classes, ready.rank: ready.role_class},
        tapes={**state.tapes, **recorded},
    )


def _planned(state: State, plan: MigrationPlanned, time_s: float) -> State:
    """A newer plan takes the place of the last one, which may stand anywhere."""
    state = _dropped(state)
    members = {m.worker for m in plan.members}
    # Who came for a planned switch that was undone after its decision has no rank, and no way back.
    undone = state.plan is not None and state.plan.leavers and state.switched is None
    spare = {r.joiner for r in state.plan.replacements} if state.plan and undone else set()
    spare = set() if state.decided is None else spare - members
    return replace(
        state,
        plan=plan,
        planned_s=time_s,
        prepared_s=None,
        decided=None,
        switched=None,
        closed=False,
        held=state.held | members,
        released=(state.released | spare) - members,
    )


def _dropped(state: State) -> State:
    """The latest plan, if it was a planned switch that is not decided, comes to nothing."""
    plan = state.plan
    if plan is None or plan.kind != "planned" or state.decided is not None or state.closed:
        return state
    joiners = {r.joiner for r in plan.replacements}
    return replace(state, dropped=plan, held=state.held - joiners)


def _current(state: State, generation: int) -> bool:
    return state.plan is not None and state.plan.generation == generation
