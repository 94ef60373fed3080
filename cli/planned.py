"""What the stream tells of a planned switch: its decision, its freeze, what was before it and what
took its place."""

from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from trainmover.schemas.events import (
    InterruptionAnnounced,
    JobCompleted,
    JobFailed,
    MigrationAborted,
    MigrationCompleted,
    MigrationDecided,
    MigrationPlanned,
    MigrationPrepared,
    WorkerFailed,
)
from trainmover.schemas.interruptions import Interruptions
from trainmover.schemas.recorded import Recorded

T0From = Literal["fault.injected", "first evidence", "plan", "freeze", "decision"]
"""What an incident is timed from."""


def decision(records: Sequence[Recorded], plan: MigrationPlanned) -> Recorded | None:
    """Of a decision and an abort, which a doubled mover can say, the first counts."""
    for record in records:
        event = record.event
        about = isinstance(event, MigrationDecided | MigrationAborted) and event.generation
        if about == plan.generation:
            return record if isinstance(event, MigrationDecided) else None
    return None


def freeze(
    records: Sequence[Recorded],
    planned: Recorded,
    decided: Recorded | None,
    generations: Collection[int],
) -> tuple[float, T0From]:
    """When the first rank stood frozen; by its clock, within what the stream proves."""
    if decided is None:
        return planned.time_s, "plan"
    earliest_s, frozen = planned.time_s, list[float]()
    for record in records:
        match record.event:
            case MigrationPrepared(generation=g) if g in generations:
                earliest_s = record.time_s
            case MigrationCompleted(generation=g, ranks=ranks) if g in generations:
                frozen += [times.reached["frozen"] for times in ranks if "frozen" in times.reached]
            case _:
                pass
    if not frozen:
        return decided.time_s, "decision"
    return min(max(earliest_s, min(frozen)), decided.time_s), "freeze"


def within(
    records: Sequence[Recorded], planned: Sequence[Recorded], decided: Recorded | None
) -> Iterator[Recorded]:
    """From the decision of a planned switch to its end, or to the plan of another incident; what
    is answered there belongs to that."""
    if decided is None:
        return
    generations = {r.event.generation for r in planned if isinstance(r.event, MigrationPlanned)}
    others = {
        x.leaver
        for r in records
        if isinstance(r.event, MigrationPlanned) and r.event.generation not in generations
        if r.seq > decided.seq
        for x in r.event.replacements
    }
    for record in records:
        match record.event:
            case MigrationCompleted(generation=g) if g in generations:
                return
            case WorkerFailed(workers=workers) if others.issuperset(workers):
                continue
            case _ if record.seq > decided.seq:
                yield record


def prelude(
    records: Sequence[Recorded],
    planned: Recorded,
    leavers: Collection[str],
    frozen: float | None,
) -> dict[str, float]:
    """What was done before a planned switch while training went on; `frozen`: its `t0`, if it is
    decided."""
    assert isinstance(planned.event, MigrationPlanned)
    generation = planned.event.generation
    machines = {m.worker: m.machine for m in planned.event.leavers}
    standing, announced = Interruptions(), dict[str, float]()
    for record in records:
        if record.seq < planned.seq:
            standing = standing.after(record.event)
            if isinstance(record.event, InterruptionAnnounced):
                announced.setdefault(record.event.interruption, record.time_s)
    asked = [each for w in leavers for each in standing.of(w, machines.get(w, ""))]
    found = {}
    if asked:
        first_s = min(announced[each.interruption] for each in asked)
        found["waited_s"] = planned.time_s - first_s
    for record in records:
        if isinstance(record.event, MigrationPrepared) and record.event.generation == generation:
            found["prepare_s"] = record.time_s - planned.time_s
            if frozen is not None:
                found["stop_s"] = frozen - record.time_s
            break
    return {name: max(0.0, seconds) for name, seconds in found.items()}


def overtaken(records: Sequence[Recorded], planned: Recorded) -> str:
    """What took the place of a planned switch that nobody aborted; empty while nothing has."""
    for record in records:
        if record.seq > planned.seq:
            match record.event:
                case MigrationPlanned() as plan:
                    return f"superseded by generation {plan.generation}: {plan.reason}"
                case JobCompleted() | JobFailed():
                    return "the job ended first"
                case _:
                    pass
    return ""
