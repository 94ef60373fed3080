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


def _current(state: State, generation: int) -> bool:
    return state.plan is not None and state.plan.generation == generation
