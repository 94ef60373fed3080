"""What the mover knows: a fold over the job's stream."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from trainmover.schemas.events import (
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
    StandbyWarmed,
    WorkerExited,
    WorkerFailed,
    WorkerRegistered,
)
from trainmover.schemas.member import Member
from trainmover.schemas.recorded import Recorded


@dataclass(frozen=True, slots=True)
class State:
    spec: JobSubmitted | None = None
    layout: LayoutAssigned | None = None
    plan: MigrationPlanned | None = None
    planned_s: float = 0.0
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
    warmed: frozenset[str] = frozenset()
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
        case RankReady() as ready:
            return replace(
                state,
                ready={**state.ready, ready.worker: ready.generation},
                shards={**state.shards, ready.rank: ready.shards},
            )
        case MigrationPlanned() as plan:
            return _planned(state, plan, recorded.time_s)
        case MigrationPrepared(generation=g) if _current(state, g):
            return replace(state, prepared_s=recorded.time_s)
        case MigrationDecided() as decided if _current(state, decided.generation):
            if state.closed:
                return state  # a doubled mover dropped the plan first
            return replace(state, decided=decided, decided_s=recorded.time_s)
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
