"""Evidence of crashes and silence in, `worker.failed` out.

An exit that an agent reports is acted on at once; silence needs time or a second witness, and
a peer that lost its link to a worker whose machine is heard is no evidence of a death.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from signal import Signals

from trainmover.schemas.base import Event
from trainmover.schemas.events import (
    Exit,
    JobCompleted,
    JobFailed,
    JobSubmitted,
    LayoutAssigned,
    MigrationAborted,
    MigrationCompleted,
    MigrationDecided,
    MigrationPlanned,
    MigrationSwitched,
    PeerLost,
    WorkerExited,
    WorkerFailed,
    WorkerFinished,
    WorkerStarted,
)
from trainmover.schemas.interruptions import Interruptions
from trainmover.schemas.recorded import Recorded
from trainmover.services.contract import Inputs, Service

MAX_EVIDENCE_CHARS = 4_000
"""Errors travel whole in `errors`; the evidence is a line for people."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    machine_silence_s: float = 2.0
    """Telemetry missing for so long is enough alone: four intervals of 0.5 s, so that three lost
    messages or a stalled agent do not cost a machine."""
    witnessed_silence_s: float = 1.0
    """Enough when a peer lost a link to the machine as well: two intervals, so that one late
    message and one broken link together are not a death."""
    settle_s: float = 0.2
    """A link may be reported broken so much before the last telemetry that is counted: both
    travel over different queues."""
    reconnect_s: float = 2.0
    """After an outage of the bus an agent may be back so much later than this service: both try
    again on their own, with pauses of up to 2 s."""


THRESHOLDS = Thresholds()


@dataclass(frozen=True, slots=True)
class Started:
    worker: str
    machine: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A `worker.exited` with what of it is a failure."""

    machine: str
    exits: tuple[Exit, ...]
    time_s: float


@dataclass(frozen=True, slots=True)
class Witness:
    """A `peer.lost` that names a worker."""

    reporter: str
    generation: int
    time_s: float


@dataclass(frozen=True, slots=True)
class Move:
    """A planned switch that is not switched to yet."""

    generation: int
    leavers: frozenset[str]
    """Hold their ranks until then, and may go afterwards."""
    joiners: frozenset[str]
    members: frozenset[str]
    decided: bool = False
    """From then on a joiner that another plan leaves out gets no rank any more, and may go."""


@dataclass(frozen=True, slots=True)
class State:
    job: str = ""
    run: str = ""
    over: bool = False
    workers: Mapping[str, Started] = field(default_factory=dict)
    """Workers that run and hold or may get a rank, oldest first."""
    spoke: Mapping[str, float] = field(default_factory=dict)
    """Machine -> when its agent last stored an event."""
    exits: tuple[Exited, ...] = ()
    """Exits that no verdict covers yet."""
    finished: frozenset[str] = frozenset()
    leavers: frozenset[str] = frozenset()
    holders: frozenset[str] = frozenset()
    """Members of the assignment in force."""
    interruptions: Interruptions = field(default_factory=Interruptions)
    move: Move | None = None
    failed: frozenset[str] = frozenset()
    witnesses: Mapping[str, tuple[Witness, ...]] = field(default_factory=dict)
    """Worker that runs -> who lost a link to it, oldest first."""


def evolve(state: State, recorded: Recorded) -> State:
    """The state after one more event of the stream."""
    match recorded.event:
        case JobSubmitted() as event:
            return replace(state, job=event.job, run=event.run)
        case JobCompleted() | JobFailed():
            return replace(state, over=True)
        case WorkerStarted() as event:
            return _started(state, event, recorded.time_s)
        case WorkerExited() as event:
            return _exited(state, event, recorded.time_s)
        case WorkerFinished() as event:
            return replace(state, finished=state.finished | {event.worker})
        case WorkerFailed() as event:
            failed = state.failed | set(event.workers)
            return _judged(replace(_without(state, event.workers), failed=failed))
        case MigrationPlanned() as event:
            return _planned(state, event)
        case MigrationDecided(generation=g) if state.move and state.move.generation == g:
            return replace(state, move=replace(state.move, decided=True))
        case MigrationAborted(generation=g, missing=missing) if (
            state.move and state.move.generation == g and not state.move.decided
        ):
            # A joiner that lives and could not be prepared is told to go.
            idle = state.move.joiners & set(missing) & state.workers.keys()
            return _let_go(replace(state, move=None), idle)
        case MigrationSwitched(generation=g) if state.move and state.move.generation == g:
            after = replace(state, move=None, holders=state.move.members)
            return _let_go(after, state.move.leavers)
        case LayoutAssigned(members=members):
            return replace(state, holders=frozenset(m.worker for m in members))
        case MigrationCompleted() as event:
            return _forgotten(state, event.generation)
        case PeerLost() as event if event.peer in state.workers:
            witness = Witness(event.worker, event.generation, recorded.time_s)
            seen = (*state.witnesses.get(event.peer, ()), witness)
            return replace(state, witnesses={**state.witnesses, event.peer: seen})
        case event:
            return replace(state, interruptions=state.interruptions.after(event))


def _started(state: State, event: WorkerStarted, time_s: float) -> State:
    spoke = {**state.spoke, event.machine: time_s}
    if event.worker in state.failed | state.leavers | state.finished:  # repeated, it may be gone
        return replace(state, spoke=spoke)
    workers = {**state.workers, event.worker: Started(event.worker, event.machine)}
    return replace(state, spoke=spoke, workers=workers)


def _exited(state: State, event: WorkerExited, time_s: float) -> State:
    state = _without(state, (exit.worker for exit in event.exits))
    exited = Exited(event.machine, event.exits, time_s)
    spoke = {**state.spoke, event.machine: time_s}
    return _judged(replace(state, spoke=spoke, exits=(*state.exits, exited)))


def _planned(state: State, plan: MigrationPlanned) -> State:
    leavers = frozenset(replacement.leaver for replacement in plan.replacements)
    members = frozenset(member.worker for member in plan.members)
    if plan.kind == "planned":
        joiners = frozenset(replacement.joiner for replacement in plan.replacements)
        return replace(state, move=Move(plan.generation, leavers, joiners, members))
    spare = state.move.joiners - members if state.move and state.move.decided else frozenset()
    return _let_go(replace(state, move=None, holders=members), leavers | spare)


def _let_go(state: State, leavers: frozenset[str]) -> State:
    return _judged(replace(_without(state, leavers), leavers=state.leavers | leavers))


def _without(state: State, workers: Iterable[str]) -> State:
    gone = set(workers)
    return replace(
        state,
        workers={name: worker for name, worker in state.workers.items() if name not in gone},
    )


def _judged(state: State) -> State:
    """Forgets exits that need no verdict any more, and what was seen of their workers.

    A leaver may go as it likes, and who holds no rank on a machine that is drained. A worker that
    had finished ends with exit code 0; one that is killed before the other ranks have finished may
    take the only copy of its state with it.
    """
    settled = state.failed | state.leavers
    open_exits = []
    for exited in state.exits:
        crashed = tuple(
            exit
            for exit in exited.exits
            if exit.worker not in settled and not (exit.code == 0 and exit.worker in state.finished)
            if exit.worker in state.holders or not state.interruptions.drains(exited.machine)
        )
        if crashed:
            open_exits.append(replace(exited, exits=crashed))
    known = {exit.worker for exited in open_exits for exit in exited.exits} | set(state.workers)
    witnesses = {name: seen for name, seen in state.witnesses.items() if name in known}
    return replace(state, exits=tuple(open_exits), witnesses=witnesses)


def _forgotten(state: State, generation: int) -> State:
    """Links that broke before `generation` were made again by it."""
    kept = {
        name: tuple(witness for witness in seen if witness.generation >= generation)
        for name, seen in state.witnesses.items()
    }
    return replace(state, witnesses={name: seen for name, seen in kept.items() if seen})


def decide(state: State, inputs: Inputs) -> Sequence[Event]:
    """The failures that the stream does not show yet."""
    if state.over:
        return ()
    return (*_crashes(state), *_silences(state, inputs))


def _crashes(state: State) -> Iterable[WorkerFailed]:
    for exited in state.exits:
        workers = tuple(exit.worker for exit in exited.exits)
        signs = _links_lost(state, workers, exited.time_s - THRESHOLDS.machine_silence_s)
        yield WorkerFailed(
            job=state.job,
            run=state.run,
            workers=workers,
            kind="crash",
            machine=exited.machine,
            evidence="; ".join(_evidence(exit) for exit in exited.exits)[:MAX_EVIDENCE_CHARS],
            reason="; ".join(_reason(exit) for exit in exited.exits)[:MAX_EVIDENCE_CHARS],
            errors=tuple(exit.error for exit in exited.exits if exit.error is not None),
            first_evidence=min([exited.time_s, *(witness.time_s for witness in signs)]),
        )


def _evidence(exit: Exit) -> str:
    if exit.code >= 0:
        return f"{exit.worker} exited with code {exit.code}"
    try:
        return f"{exit.worker} was killed by {Signals(-exit.code).name}"
    except ValueError:  # a real-time signal has no name
        return f"{exit.worker} was killed by signal {-exit.code}"


def _reason(exit: Exit) -> str:
    if exit.error is not None:
        return f"{exit.worker} raised {exit.error.exception} in step {exit.error.step}"
    if exit.code == 0:
        return f"{exit.worker} ended with exit code 0 before it had finished its steps"
    return f"the agent saw {exit.worker} end"


@dataclass(frozen=True, slots=True)
class _Silence:
    machine: str
    workers: tuple[str, ...]
    since_s: float
    seconds: float
    witnesses: tuple[Witness, ...]
    """Peers that lost a link to the machine since then."""

    @property
    def limit_s(self) -> float:
        witnessed, alone = THRESHOLDS.witnessed_silence_s, THRESHOLDS.machine_silence_s
        return witnessed if self.witnesses else alone

    @property
    def reporters(self) -> str:
        return ", ".join(dict.fromkeys(witness.reporter for witness in self.witnesses))


def _silences(state: State, inputs: Inputs) -> Iterable[WorkerFailed]:
    for silence in _silent(state, inputs):
        if silence.seconds < silence.limit_s:
            continue
        evidence = f"no telemetry of {silence.machine} for {silence.limit_s:g} s"
        if silence.witnesses:
            evidence += f"; links to it lost by {silence.reporters}"
        yield WorkerFailed(
            job=state.job,
            run=state.run,
            workers=silence.workers,
            kind="machine_lost",
            machine=silence.machine,
            evidence=evidence[:MAX_EVIDENCE_CHARS],
            reason=f"nothing shows that {silence.machine} lives",
            first_evidence=min(
                (witness.time_s for witness in silence.witnesses), default=silence.since_s
            ),
        )


def _silent(state: State, inputs: Inputs) -> Iterable[_Silence]:
    """Every machine with workers that run, and how long nothing came from its agent."""
    machines: dict[str, list[str]] = {}
    for worker in state.workers.values():
        machines.setdefault(worker.machine, []).append(worker.worker)
    for machine, workers in machines.items():
        heard_s, up_s = max(inputs.heard.get(machine, 0.0), state.spoke[machine]), inputs.up_since_s
        since_s = heard_s if heard_s >= up_s else up_s + THRESHOLDS.reconnect_s
        witnesses = _links_lost(state, workers, max(heard_s, up_s) - THRESHOLDS.settle_s)
        yield _Silence(machine, tuple(workers), since_s, inputs.now_s - since_s, witnesses)


def _links_lost(state: State, workers: Iterable[str], after_s: float) -> tuple[Witness, ...]:
    return tuple(
        witness
        for worker in workers
        for witness in state.witnesses.get(worker, ())
        if witness.time_s >= after_s
    )


def explain(state: State, inputs: Inputs) -> tuple[str, ...]:
    """Open suspicions, one line each, and why they are not acted on; for the log of the shell."""
    if state.over:
        return ()
    lines = []
    for silence in _silent(state, inputs):
        if silence.seconds >= silence.limit_s:
            continue  # acted on
        half_s = THRESHOLDS.machine_silence_s / 2
        if silence.seconds >= half_s:
            lines.append(
                f"{silence.machine} is silent for {half_s:g} s: failed after {silence.limit_s:g} s"
            )
        for worker in silence.workers:
            seen = state.witnesses.get(worker, ())
            if seen:
                reporters = ", ".join(dict.fromkeys(witness.reporter for witness in seen))
                lines.append(
                    f"{reporters} lost the link to {worker}: not failed while {silence.machine} "
                    "is heard; a broken link needs a relink only"
                )
    return tuple(lines)


SERVICE = Service(name="detector", initial=State(), evolve=evolve, decide=decide)
