"""What an interruption was and what it cost, read from the stream alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from trainmover.schemas.events import (
    FaultInjected,
    MigrationAborted,
    MigrationCompleted,
    MigrationDecided,
    MigrationPlanned,
    MigrationSwitched,
    PeerLost,
    StepAborted,
    WorkerFailed,
)
from trainmover.schemas.recorded import Recorded

FAULT_BELONGS_S = 60.0
"""A drill's fault this long before the plan still is its cause: a hang takes a while to see."""
BAR_WIDTH = 40

MigrationEvent = MigrationDecided | MigrationSwitched | MigrationCompleted | MigrationAborted


class Incident(BaseModel):
    """One interruption. Times `*_s` are seconds after `t0`, by the clock of the stream."""

    model_config = ConfigDict(frozen=True)

    incident: str
    kind: str
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
    t0_from: Literal["fault.injected", "first evidence", "plan"]
    detected_s: float | None
    planned_s: float
    prepared_s: float | None
    """Every member has answered and the step to go on from is decided."""
    switched_s: float | None
    first_step_s: float | None
    """First committed step after the interruption."""
    downtime_s: float | None
    normal_step_s: float | None
    """Subtracted in `downtime_s`; None: not known, `downtime_s` is the whole time."""


def incidents(
    records: Sequence[Recorded], normal_steps: Mapping[str, float] | None = None
) -> list[Incident]:
    """The incidents of a job in the order of their first plans.

    `normal_steps`: incident -> duration of a normal step before it, in seconds.
    """
    names = dict.fromkeys(
        r.event.incident for r in records if isinstance(r.event, MigrationPlanned)
    )
    known = normal_steps or {}
    return [_incident(name, records, known.get(name)) for name in names]


def _incident(name: str, records: Sequence[Recorded], normal_step_s: float | None) -> Incident:
    plans = [
        (r, r.event)
        for r in records
        if isinstance(r.event, MigrationPlanned) and r.event.incident == name
    ]
    first, last = plans[0][0], plans[-1][1]
    replacements = list({(x.rank, x.leaver): x for _, p in plans for x in p.replacements}.values())
    leavers = tuple(dict.fromkeys(x.leaver for x in replacements))
    verdict = _verdict(records, leavers, last.generation)
    t0, t0_from = _start(records, first, plans[0][1], leavers, verdict)
    of_last = {
        type(r.event): r
        for r in records
        if isinstance(r.event, MigrationEvent) and r.event.generation == last.generation
    }
    completed, aborted = of_last.get(MigrationCompleted), of_last.get(MigrationAborted)

    def after(record: Recorded | None) -> float | None:
        return None if record is None else max(0.0, record.time_s - t0)

    first_step_s = after(completed)
    downtime_s = first_step_s
    if first_step_s is not None and normal_step_s is not None:
        downtime_s = max(0.0, first_step_s - normal_step_s)
    return Incident(
        incident=name,
        kind=_kind(verdict, plans[0][1]),
        outcome="completed" if completed else "aborted" if aborted else "open",
        reason=_reason(aborted) or last.reason,
        leavers=leavers,
        joiners=tuple(x.joiner for x in last.replacements),
        ranks=tuple(sorted({x.rank for x in replacements})),
        generations=tuple(p.generation for _, p in plans),
        lost_steps=_lost_steps(records, first, of_last.get(MigrationDecided)),
        t0=t0,
        t0_from=t0_from,
        detected_s=after(verdict),
        planned_s=max(0.0, first.time_s - t0),
        prepared_s=after(of_last.get(MigrationDecided)),
        switched_s=after(of_last.get(MigrationSwitched)),
        first_step_s=first_step_s,
        downtime_s=downtime_s,
        normal_step_s=normal_step_s,
    )


def _verdict(
    records: Sequence[Recorded], leavers: tuple[str, ...], generation: int
) -> Recorded | None:
    """The first worker.failed about a leaver."""
    for record in records:
        if isinstance(record.event, WorkerFailed) and set(record.event.workers) & set(leavers):
            return record
    return None


def _start(
    records: Sequence[Recorded],
    first: Recorded,
    plan: MigrationPlanned,
    leavers: tuple[str, ...],
    verdict: Recorded | None,
) -> tuple[float, Literal["fault.injected", "first evidence", "plan"]]:
    before = [r for r in records if r.seq < first.seq]
    for record in reversed(before):
        recent = first.time_s - record.time_s <= FAULT_BELONGS_S
        if isinstance(record.event, FaultInjected) and recent and record.event.worker in leavers:
            return record.time_s, "fault.injected"
    if verdict is not None and isinstance(verdict.event, WorkerFailed):
        return verdict.event.first_evidence, "first evidence"
    for record in before:
        broken = isinstance(record.event, PeerLost | StepAborted)
        if broken and getattr(record.event, "generation", 0) == plan.generation - 1:
            return record.time_s, "first evidence"
    return first.time_s, "plan"


def _kind(verdict: Recorded | None, plan: MigrationPlanned) -> str:
    if verdict is not None and isinstance(verdict.event, WorkerFailed):
        return verdict.event.kind
    return plan.kind


def _reason(aborted: Recorded | None) -> str:
    event = aborted.event if aborted is not None else None
    return event.reason if isinstance(event, MigrationAborted) else ""


def _lost_steps(
    records: Sequence[Recorded], first: Recorded, decided: Recorded | None
) -> int | None:
    """Committed steps known to the stream before the plan, beyond where the job goes on from."""
    if decided is None or not isinstance(decided.event, MigrationDecided):
        return None
    known = [
        r.event.step for r in records if isinstance(r.event, StepAborted) and r.seq < first.seq
    ]
    return max(0, max(known, default=0) - decided.event.target)


def timeline(incident: Incident) -> str:
    """An incident for people: one line per phase, with its milliseconds and a bar."""
    return "\n".join(_timeline(incident))


def _timeline(incident: Incident) -> Iterator[str]:
    ranks = ", ".join(map(str, incident.ranks)) or "none"
    moved = f"{', '.join(incident.leavers)} -> {', '.join(incident.joiners)}"
    who = f"rank {ranks}: {moved}" if incident.leavers else "the same workers, linked again"
    yield f"incident {incident.incident} ({incident.kind}, {incident.outcome}): {who}"
    phases = (
        ("detected", incident.detected_s),
        ("planned", incident.planned_s),
        ("prepared", incident.prepared_s),
        ("switched", incident.switched_s),
        ("first step", incident.first_step_s),
    )
    reached = [(name, at) for name, at in phases if at is not None]
    total = max((at for _, at in reached), default=0.0) or 1.0
    before = 0.0
    for name, at in reached:
        start, width = int(BAR_WIDTH * before / total), int(BAR_WIDTH * (at - before) / total)
        bar = " " * start + "#" * max(1, width)
        yield f"  {name:<10} {at * 1e3:8.0f} ms  +{(at - before) * 1e3:6.0f} ms  {bar}"
        before = max(before, at)
    if incident.downtime_s is None:
        yield f"  {incident.outcome}: {incident.reason}"
        return
    normal = incident.normal_step_s
    less = f"less one step of {normal * 1e3:.0f} ms" if normal is not None else "a step included"
    yield (
        f"  downtime {incident.downtime_s * 1e3:.0f} ms since {incident.t0_from} ({less}),"
        f" lost steps: {incident.lost_steps}"
    )
