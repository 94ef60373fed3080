"""What an interruption was and what it cost, read from the stream alone."""

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from trainmover.cli.migrations import Migration, migrations
from trainmover.cli.planned import T0From, decision, freeze, overtaken, prelude, within
from trainmover.schemas.events import (
    FaultInjected,
    MigrationCompleted,
    MigrationPlanned,
    PeerLost,
    StepAborted,
    WorkerFailed,
)
from trainmover.schemas.recorded import Recorded
from trainmover.telemetry.phases import BELONGS_S


class Failure(BaseModel):
    """A verdict of the detector."""

    model_config = ConfigDict(frozen=True)

    workers: tuple[str, ...]
    kind: str
    evidence: str
    reason: str
    first_evidence_s: float
    detected_s: float


class Incident(BaseModel):
    """One interruption. Times `*_s` are seconds after `t0`, by the clock of the stream.

    A planned one begins when the first rank stands frozen; what was before, while training went
    on, has durations of its own. As long as it is not decided it begins with its plan, and costs
    nothing.
    """

    model_config = ConfigDict(frozen=True)

    incident: str
    kind: str
    """`crash`, `machine_lost`, `relink` or `planned`; of a planned one in which somebody failed
    after the decision, that failure's."""
    planned: bool = False
    """It began as a planned switch."""
    outcome: Literal["completed", "aborted", "open"]
    reason: str
    leavers: tuple[str, ...]
    joiners: tuple[str, ...]
    ranks: tuple[int, ...]
    generations: tuple[int, ...]
    lost_steps: int | None
    """Committed steps that had to be done again; None while nothing is decided."""
    t0: float
    """Seconds since 1970."""
    t0_from: T0From
    waited_s: float | None = None
    """From `interruption.announced` to its plan, of a planned one."""
    prepare_s: float | None = None
    """From there until its joiners stood ready: `migration.prepared`."""
    stop_s: float | None = None
    """From there until the first rank stood at the end of a step."""
    detected_s: float | None
    planned_s: float | None
    """None: before `t0`."""
    collected_s: float | None
    """Every member has ended its old generation, by the workers' clocks."""
    prepared_s: float | None
    """The step to go on from is decided."""
    pulled_s: float | None
    """Every member has the state of that step, by the workers' clocks."""
    switched_s: float | None
    first_step_s: float | None
    """First committed step after the interruption."""
    downtime_s: float | None
    normal_step_s: float | None
    """Subtracted in `downtime_s`; None: not known, `downtime_s` is the whole time."""
    failures: tuple[Failure, ...]
    migrations: tuple[Migration, ...]
    """Of each plan; what is said above of stages is of the last one."""

    @property
    def undecided(self) -> bool:
        """A planned one that is not decided, or was dropped: training goes on."""
        return self.planned and self.t0_from == "plan"

    @property
    def last_s(self) -> float:
        """The latest that is known of it."""
        detected = (failure.detected_s for failure in self.failures)
        return max((*detected, *(migration.last_s for migration in self.migrations)))


def incidents(records: Sequence[Recorded]) -> list[Incident]:
    """The incidents of a job in the order of their first plans."""
    plans: dict[str, list[Recorded]] = {}
    for record in records:
        if isinstance(record.event, MigrationPlanned):
            plans.setdefault(record.event.incident, []).append(record)
    return [_incident(name, found, records) for name, found in plans.items()]


def _incident(name: str, planned: Sequence[Recorded], records: Sequence[Recorded]) -> Incident:
    plans = [r.event for r in planned if isinstance(r.event, MigrationPlanned)]
    replacements = list({(x.rank, x.leaver): x for p in plans for x in p.replacements}.values())
    leavers = tuple(dict.fromkeys(x.leaver for x in replacements))
    is_planned = plans[0].kind == "planned"
    decided = decision(records, plans[0]) if is_planned else None
    verdicts = [
        (r.time_s, r.event)
        for r in (within(records, planned, decided) if is_planned else records)
        if isinstance(r.event, WorkerFailed)
        if is_planned or set(r.event.workers) & set(leavers)
    ]
    t0, t0_from = (
        freeze(records, planned[0], decided, {p.generation for p in plans})
        if is_planned
        else _start(records, planned[0], plans[0], leavers, verdicts)
    )
    failures = tuple(_failure(at, event, t0) for at, event in verdicts)
    parts = tuple(migrations(planned, records, t0))
    last = parts[-1]
    normal_step_s = _normal_step(records, last.generation)
    downtime_s = last.completed_s
    if downtime_s is not None and normal_step_s is not None:
        downtime_s = max(0.0, downtime_s - normal_step_s)
    outcome, reason = _outcome(last), last.abort_reason or last.reason
    before: dict[str, float] = {}
    if is_planned:
        before = prelude(records, planned[0], leavers, None if decided is None else t0)
        instead = overtaken(records, planned[0]) if decided is None else ""
        if outcome == "open" and instead:
            outcome, reason = "aborted", instead
    return Incident(
        incident=name,
        kind=failures[0].kind if failures else plans[0].kind,
        planned=is_planned,
        outcome=outcome,
        reason=reason,
        leavers=leavers,
        joiners=tuple(x.joiner for x in last.replacements),
        ranks=tuple(sorted({x.rank for x in replacements})),
        generations=tuple(p.generation for p in plans),
        lost_steps=_lost_steps(records, planned[0], last.target),
        t0=t0,
        t0_from=t0_from,
        **before,
        detected_s=failures[0].detected_s if failures else None,
        planned_s=parts[0].planned_s,
        collected_s=last.all_reached_s("collected"),
        prepared_s=last.decided_s,
        pulled_s=last.all_reached_s("restored"),
        switched_s=last.switched_s,
        first_step_s=last.completed_s,
        downtime_s=downtime_s,
        normal_step_s=normal_step_s,
        failures=failures,
        migrations=parts,
    )


def _outcome(last: Migration) -> Literal["completed", "aborted", "open"]:
    if last.completed_s is not None:
        return "completed"
    return "open" if last.aborted_s is None else "aborted"


def _failure(at: float, verdict: WorkerFailed, t0: float) -> Failure:
    return Failure(
        workers=verdict.workers,
        kind=verdict.kind,
        evidence=verdict.evidence,
        reason=verdict.reason,
        first_evidence_s=max(0.0, verdict.first_evidence - t0),
        detected_s=max(0.0, at - t0),
    )


def _start(
    records: Sequence[Recorded],
    first: Recorded,
    plan: MigrationPlanned,
    leavers: tuple[str, ...],
    verdicts: Sequence[tuple[float, WorkerFailed]],
) -> tuple[float, T0From]:
    before = [r for r in records if r.seq < first.seq]
    ended = max((r.seq for r in before if isinstance(r.event, MigrationCompleted)), default=0)
    for record in reversed(before):
        fault, recent = record.event, first.time_s - record.time_s <= BELONGS_S
        if isinstance(fault, FaultInjected) and recent:
            cut = not leavers and fault.kind == "cut" and record.seq > ended
            if cut or fault.worker in leavers:
                return record.time_s, "fault.injected"
    if verdicts:
        return verdicts[0][1].first_evidence, "first evidence"
    for record in before:
        broken = isinstance(record.event, PeerLost | StepAborted)
        if broken and getattr(record.event, "generation", 0) == plan.generation - 1:
            return record.time_s, "first evidence"
    return first.time_s, "plan"


# ---- costs


def _normal_step(records: Sequence[Recorded], generation: int) -> float | None:
    for record in records:
        event = record.event
        if isinstance(event, MigrationCompleted) and event.generation == generation:
            return event.normal_step_s
    return None


def _lost_steps(records: Sequence[Recorded], first: Recorded, target: int | None) -> int | None:
    """Committed steps known to the stream before the plan, beyond where the job goes on from."""
    if target is None:
        return None
    known = [
        r.event.step for r in records if isinstance(r.event, StepAborted) and r.seq < first.seq
    ]
    return max(0, max(known, default=0) - target)
