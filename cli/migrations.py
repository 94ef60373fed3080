"""What each plan of an interruption asked for, and how far it came, read from the stream."""

from collections.abc import Iterator, Sequence, Set
from typing import Literal

from pydantic import BaseModel, ConfigDict

from trainmover.schemas.events import (
    MigrationAborted,
    MigrationCompleted,
    MigrationDecided,
    MigrationPlanned,
    MigrationPrepared,
    MigrationSwitched,
    RankReady,
    RankTimes,
    Replacement,
    Restored,
    Source,
)
from trainmover.schemas.recorded import Recorded

PLANNED, PREPARED, DECIDED, SWITCHED = range(4)
KNOT_BEFORE = {
    "collected": PLANNED,
    "obeyed": DECIDED,
    "restored": DECIDED,
    "switched": DECIDED,
    "resumed": SWITCHED,
    "first_step": SWITCHED,
}
"""Stage -> the stored event that it follows; it is before the next."""
KNOT_BEFORE_PLANNED = {"frozen": PREPARED, **KNOT_BEFORE, "collected": DECIDED}
"""The same of a planned switch, which is decided before anybody is asked."""

MigrationEvent = (
    MigrationPrepared
    | MigrationDecided
    | RankReady
    | MigrationSwitched
    | MigrationCompleted
    | MigrationAborted
)


class RankPath(BaseModel):
    """What one rank went through."""

    model_config = ConfigDict(frozen=True)

    rank: int
    worker: str
    joined: bool
    reached_s: dict[str, float] = {}
    """Stage -> seconds after the incident's `t0`, by the worker's clock; empty unless completed."""


class Promotion(BaseModel):
    """How a worker came to its rank, and what that cost."""

    model_config = ConfigDict(frozen=True)

    rank: int
    worker: str
    bound: Literal["set-up", "again", "rebound"]
    setup_s: float


class Migration(BaseModel):
    """One plan. Times `*_s` are seconds after the incident's `t0`, by the clock of the stream; None
    for what was before it, or is not known to have been."""

    model_config = ConfigDict(frozen=True)

    generation: int
    kind: Literal["crash", "relink", "planned"] = "crash"
    reason: str
    replacements: tuple[Replacement, ...]
    planned_s: float | None
    ready: bool = False
    """The joiners of a planned switch stood ready."""
    ready_s: float | None = None
    decided_s: float | None = None
    target: int | None = None
    """Committed steps from which all go on."""
    setup_again: bool = False
    sources: tuple[Source, ...] = ()
    dirty: tuple[int, ...] = ()
    holding: tuple[int, ...] = ()
    switched_s: float | None = None
    restored: tuple[Restored, ...] = ()
    promotions: tuple[Promotion, ...] = ()
    links: dict[str, tuple[int, int, int]] = {}
    """Rank -> links opened, closed, kept."""
    completed_s: float | None = None
    aborted_s: float | None = None
    abort_reason: str = ""
    missing: tuple[str, ...] = ()
    ranks: tuple[RankPath, ...] = ()

    def placed_s(self, path: RankPath) -> dict[str, float]:
        """`path.reached_s` in the order that the stream proves, whatever the worker's clock says.

        A member answers a collect after the plan and before the decision, and so on.
        """
        knots = (self.planned_s, self.ready_s, self.decided_s, self.switched_s, self.completed_s)
        placed: dict[str, float] = {}
        at = self.start_s
        stages = KNOT_BEFORE_PLANNED if self.kind == "planned" else KNOT_BEFORE
        for stage, knot in stages.items():
            if stage in path.reached_s:
                before = (k for k in knots[: knot + 1] if k is not None)
                after = (k for k in knots[knot + 1 :] if k is not None)
                at = max(at, *before, min(path.reached_s[stage], *after, self.last_s))
                placed[stage] = at
        return placed

    def all_reached_s(self, stage: str) -> float | None:
        """When the last of the ranks did; None unless all are known to."""
        times = [self.placed_s(path).get(stage) for path in self.ranks]
        known = [at for at in times if at is not None]
        return max(known) if known and len(known) == len(times) else None

    @property
    def start_s(self) -> float:
        """Since when it is of the incident."""
        return self.planned_s or 0.0

    @property
    def last_s(self) -> float:
        """The latest that the stream tells of it."""
        times = (self.ready_s, self.decided_s, self.switched_s, self.completed_s, self.aborted_s)
        return max((at for at in times if at is not None), default=self.start_s)


def migrations(
    plans: Sequence[Recorded], records: Sequence[Recorded], t0: float
) -> Iterator[Migration]:
    """One of each plan, in their order."""
    joiners: set[str] = set()
    for planned in plans:
        plan = planned.event
        assert isinstance(plan, MigrationPlanned)
        joiners |= {replacement.joiner for replacement in plan.replacements}
        migration = _planned(plan, joiners, _since(t0, planned.time_s, plan.kind))
        for record in records:
            event = record.event
            if isinstance(event, MigrationEvent) and event.generation == plan.generation:
                if isinstance(event, MigrationDecided) and migration.aborted_s is not None:
                    continue  # of a doubled mover; it counts for nobody
                at_s = _since(t0, record.time_s, plan.kind)
                migration = _further(migration, event, at_s, t0)
        yield migration


def _since(t0: float, time_s: float, kind: str) -> float | None:
    """Seconds; only a planned switch begins before its `t0`."""
    if kind == "planned" and time_s < t0:
        return None
    return max(0.0, time_s - t0)


def _planned(plan: MigrationPlanned, joiners: Set[str], planned_s: float | None) -> Migration:
    return Migration(
        generation=plan.generation,
        kind=plan.kind,
        reason=plan.reason,
        replacements=plan.replacements,
        planned_s=planned_s,
        ranks=tuple(
            RankPath(rank=m.rank, worker=m.worker, joined=m.worker in joiners) for m in plan.members
        ),
    )


def _further(before: Migration, event: MigrationEvent, at_s: float | None, t0: float) -> Migration:
    found: dict[str, object]
    match event:
        case MigrationPrepared():
            found = {"ready": True, "ready_s": at_s}
        case MigrationDecided():
            told = event.model_dump(include={"target", "setup_again", "dirty", "holding"})
            found = told | {"decided_s": at_s, "sources": event.sources}
        case RankReady():
            told = event.model_dump(include=set(Promotion.model_fields))
            found = {"promotions": (*before.promotions, Promotion(**told))}
        case MigrationSwitched():
            found = {"switched_s": at_s, "restored": event.restored, "links": event.links}
        case MigrationCompleted():
            ranks = tuple(_path(times, t0) for times in event.ranks) or before.ranks
            found = {"completed_s": at_s, "ranks": ranks}
        case MigrationAborted():
            found = {"aborted_s": at_s, "abort_reason": event.reason, "missing": event.missing}
    return before.model_copy(update=found)


def _path(times: RankTimes, t0: float) -> RankPath:
    return RankPath(
        rank=times.rank,
        worker=times.worker,
        joined=times.joined,
        reached_s={stage: at - t0 for stage, at in times.reached.items()},
    )
