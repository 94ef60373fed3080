"""The phases of an incident as spans, read from the job's stream alone. A fold; pure.

Children of the root follow each other without a gap, from the first evidence to the end:
detect, plan, collect, move, resume, and again from plan on when a generation came to nothing. Of a
planned switch: plan, prepare, freeze, move, resume; dropped before its decision it has ended.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainmover.schemas.base import Event
from trainmover.schemas.events import (
    FaultInjected,
    InterruptionAnnounced,
    InterruptionCancelled,
    JobCompleted,
    JobFailed,
    LayoutAssigned,
    MigrationAborted,
    MigrationCompleted,
    MigrationDecided,
    MigrationPlanned,
    MigrationPrepared,
    MigrationSwitched,
    PeerLost,
    StepAborted,
    WorkerExited,
    WorkerFailed,
)
from trainmover.schemas.recorded import Recorded
from trainmover.schemas.trace import ROOT
from trainmover.telemetry.incident import (
    DETECTOR,
    PLANNER,
    Closed,
    Incident,
    ended,
    phase,
    span,
)
from trainmover.telemetry.spans import Span, Value, ns

BELONGS_S = 60.0
"""A sign so long before the verdict, or the broken link, still is one of the same incident."""


@dataclass(frozen=True, slots=True)
class _Left:
    machine: str
    code: int
    ended_s: float
    stored_s: float


@dataclass(frozen=True, slots=True)
class _Failed:
    kind: str
    first_evidence_s: float
    time_s: float


@dataclass(frozen=True, slots=True)
class _Announced:
    event: InterruptionAnnounced
    since_s: float
    """When it came, or when what was in its way was over."""


@dataclass(frozen=True, slots=True)
class State:
    generation: int = 0
    incident: Incident | None = None
    faults: Mapping[str, float] = field(default_factory=dict)
    exits: Mapping[str, _Left] = field(default_factory=dict)
    failures: Mapping[str, _Failed] = field(default_factory=dict)
    announced: Mapping[str, _Announced] = field(default_factory=dict)
    """By its name, as long as it stands."""
    sign_s: float | None = None
    """When a link or a step of this generation first broke, since it was told to run."""
    known: int = 0


def step(state: State, recorded: Recorded) -> tuple[State, Sequence[Closed]]:
    """The state after one more event, and the spans that it closes."""
    time_s = recorded.time_s
    match recorded.event:
        case LayoutAssigned(generation=generation):
            return replace(state, generation=generation), ()
        case FaultInjected(worker=worker):
            return replace(state, faults={**state.faults, worker: time_s}), ()
        case WorkerExited() as event:
            # By the agent's clock, which may be off, or not said.
            near = time_s - BELONGS_S <= recorded.occurred_s <= time_s
            ended_s = recorded.occurred_s if near else time_s
            left = {e.worker: _Left(event.machine, e.code, ended_s, time_s) for e in event.exits}
            return replace(state, exits={**state.exits, **left}), ()
        case WorkerFailed() as event:
            failed = _Failed(event.kind, event.first_evidence, time_s)
            new = {worker: failed for worker in event.workers if worker not in state.failures}
            return replace(state, failures={**state.failures, **new}), ()
        case PeerLost() | StepAborted() as event:
            return _signed(state, event, time_s), ()
        case InterruptionAnnounced(interruption=name) as event:
            announced = {name: _Announced(event, time_s), **state.announced}
            return replace(state, announced=announced), ()
        case InterruptionCancelled(interruption=name):
            kept = {other: one for other, one in state.announced.items() if other != name}
            return replace(state, announced=kept), ()
        case MigrationPlanned(kind="planned") as plan:
            state, dropped = _dropped(state, plan, time_s)
            state, closed = _move_planned(state, plan, time_s)
            return state, (*dropped, *closed)
        case MigrationPlanned() as plan:
            state, dropped = _dropped(state, plan, time_s)
            state, closed = _planned(state, plan, time_s)
            return state, (*dropped, *closed)
        case event if state.incident is not None:
            return _advanced(state, state.incident, event, time_s)
        case _:
            return state, ()


def _advanced(
    state: State, under_way: Incident, event: Event, time_s: float
) -> tuple[State, Sequence[Closed]]:
    match event:
        case MigrationPrepared(generation=g) if g == under_way.plan.generation:
            if under_way.phase != "prepare":
                return state, ()
            after = replace(under_way, phase="freeze", since_s=time_s)
            return replace(state, incident=after), (phase(under_way, time_s),)
        case MigrationDecided(generation=g) as decided if g == under_way.plan.generation:
            more: dict[str, Value] = {"target": decided.target, "holding": decided.holding}
            more |= {"dirty": decided.dirty, "setup_again": decided.setup_again}
            closed = phase(under_way, time_s, more)
            after = replace(under_way, phase="move", since_s=time_s, target=decided.target)
            return replace(state, incident=after, generation=g), (closed,)
        case MigrationSwitched(generation=g) as switched if g == under_way.plan.generation:
            num_bytes = sum(one.num_bytes for one in switched.restored)
            closed = phase(under_way, time_s, {"bytes": num_bytes})
            after = replace(under_way, phase="resume", since_s=time_s)
            return replace(state, incident=after, sign_s=None), (closed,)
        case MigrationAborted(generation=g, reason=reason) if g == under_way.plan.generation:
            if under_way.undecided:
                return _over(state, time_s), ended(under_way, time_s, "aborted", reason)
            closed = phase(under_way, time_s, error=reason)
            after = replace(under_way, phase="", since_s=time_s)
            return replace(state, incident=after), (closed,)
        case MigrationCompleted(generation=g, committed=n) if g == under_way.plan.generation:
            spans = ended(under_way, time_s, "completed", more={"committed": n})
            return _over(state, time_s), spans
        case JobCompleted() | JobFailed() if under_way.undecided:
            return _over(state, time_s), ended(under_way, time_s, "aborted", "the job ended first")
        case JobCompleted():
            return _over(state, time_s), ended(under_way, time_s, "completed")
        case JobFailed(reason=reason):
            return _over(state, time_s), ended(under_way, time_s, "failed", reason)
        case _:
            return state, ()


def _over(state: State, time_s: float) -> State:
    """No incident is under way; who was announced for so long waits from now on."""
    waits = {name: replace(one, since_s=time_s) for name, one in state.announced.items()}
    return replace(state, incident=None, announced=waits)


def _signed(state: State, event: PeerLost | StepAborted, time_s: float) -> State:
    if isinstance(event, StepAborted):
        state = replace(state, known=max(state.known, event.step))
    if event.generation == state.generation and state.sign_s is None:
        state = replace(state, sign_s=time_s)
    return state


# ---- a plan


def _dropped(state: State, plan: MigrationPlanned, time_s: float) -> tuple[State, Sequence[Closed]]:
    """A planned switch that is not decided ends with the next plan, whose incident is another."""
    under_way = state.incident
    if under_way is None or not under_way.undecided:
        return state, ()
    reason = f"superseded by generation {plan.generation}: {plan.reason}"
    return _over(state, time_s), ended(under_way, time_s, "aborted", reason)


def _move_planned(
    state: State, plan: MigrationPlanned, time_s: float
) -> tuple[State, Sequence[Closed]]:
    """Planned since its first worker was announced, or since the incident before it was over."""
    leavers = tuple(r.leaver for r in plan.replacements)
    joiners = tuple(r.joiner for r in plan.replacements)
    asked = [
        one.since_s
        for one in state.announced.values()
        if any(one.event.concerns(m.worker, m.machine) for m in plan.leavers)
    ]
    start_s = min(asked, default=time_s)
    more: dict[str, Value] = {"reason": plan.reason, "joiners": joiners}
    closed = Closed(PLANNER, span(plan, "plan", start_s, time_s, more))
    incident = Incident(
        start_s=start_s,
        began_as=plan.kind,
        plan=plan,
        known=state.known,
        phase="prepare",
        since_s=time_s,
        generations=(plan.generation,),
        leavers=leavers,
        ranks=tuple(r.rank for r in plan.replacements),
    )
    return replace(state, incident=incident), (closed,)


def _planned(state: State, plan: MigrationPlanned, time_s: float) -> tuple[State, Sequence[Closed]]:
    under_way = state.incident
    before = under_way if under_way and under_way.name == plan.incident else None
    known_leavers = before.leavers if before else ()
    out = [r.leaver for r in plan.replacements]
    if before:  # a joiner whose rank the leaver has back
        members = {m.worker for m in plan.members}
        out += [r.joiner for r in before.plan.replacements if r.joiner not in members]
    new = tuple(dict.fromkeys(w for w in out if w not in known_leavers))
    failures = {w: state.failures[w] for w in new if w in state.failures}
    concerned = tuple(failures) or (*new, *(member.worker for member in plan.members))
    start_s, cause_s = _causes(state, before, failures, concerned, time_s)
    closed = []
    if before and before.phase:
        reason = f"superseded by generation {plan.generation}: {plan.reason}"
        closed.append(phase(before, start_s, error=reason))
    kinds = tuple(dict.fromkeys(failed.kind for failed in failures.values()))
    detect = None
    if failures:
        verdict: dict[str, Value] = {"workers": tuple(failures), "kinds": kinds}
        detect = span(plan, "detect", start_s, cause_s, verdict)
        closed.append(Closed(DETECTOR, detect))
    closed += [_exit(plan, w, state.exits[w], detect) for w in new if w in state.exits]
    joiners = tuple(r.joiner for r in plan.replacements)
    more: dict[str, Value] = {"reason": plan.reason, "joiners": joiners}
    closed.append(Closed(PLANNER, span(plan, "plan", cause_s, time_s, more)))
    ranks = {r.rank for r in plan.replacements}
    incident = Incident(
        start_s=before.start_s if before else start_s,
        began_as=before.began_as if before else plan.kind,
        verdict=(before.verdict if before else "") or next(iter(kinds), ""),
        plan=plan,
        known=before.known if before else state.known,
        since_s=time_s,
        generations=(*(before.generations if before else ()), plan.generation),
        leavers=(*known_leavers, *new),
        ranks=tuple(sorted(ranks | set(before.ranks if before else ()))),
    )
    faults = {w: at_s for w, at_s in state.faults.items() if w not in concerned}
    after = replace(state, generation=plan.generation, incident=incident, sign_s=None)
    return replace(after, faults=faults), closed


def _causes(
    state: State,
    before: Incident | None,
    failures: Mapping[str, _Failed],
    concerned: Sequence[str],
    time_s: float,
) -> tuple[float, float]:
    """When the first sign of what led to a plan of `time_s` came, and the verdict if there was one.

    Within an incident not before its last decision; an abort calls for a plan by itself.
    """
    since_s = before.since_s if before else 0.0
    signs = [time_s if state.sign_s is None else state.sign_s]
    verdict_s = max(since_s, min([failed.time_s for failed in failures.values()] or signs))
    found = [state.failures[w].first_evidence_s for w in concerned if w in state.failures]
    found += [state.exits[w].ended_s for w in concerned if w in state.exits]
    found += [state.faults[w] for w in concerned if w in state.faults]
    belong = [sign_s for sign_s in found if verdict_s - sign_s <= BELONGS_S]
    start_s = max(since_s, min([verdict_s, *belong]))
    if before and not before.phase:
        start_s = since_s
    return start_s, verdict_s if failures else start_s


def _exit(plan: MigrationPlanned, worker: str, left: _Left, detect: Span | None) -> Closed:
    """Evidence of what was detected; it may have been replaced for another reason."""
    left_at = Span(
        run=plan.run,
        incident=plan.incident,
        name=f"exit {worker}",
        parent=detect.name if detect else ROOT,
        start_ns=ns(left.ended_s),
        end_ns=ns(left.stored_s),
        attributes={"worker": worker, "machine": left.machine, "code": left.code},
    )
    return Closed(f"agent/{left.machine}", left_at)
