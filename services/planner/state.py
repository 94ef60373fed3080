"""What the planner knows of a job: a fold over its stream."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from trainmover.schemas.events import (
    InterruptionAnnounced,
    InterruptionCancelled,
    JobCompleted,
    JobFailed,
    JobStalled,
    JobStarted,
    JobSubmitted,
    LayoutAssigned,
    MigrationAborted,
    MigrationCompleted,
    MigrationDecided,
    MigrationPlanned,
    MigrationPrepared,
    MigrationSwitched,
    PeerLost,
    PoolExhausted,
    PoolReplenished,
    RankReady,
    Replacement,
    StandbyLost,
    StandbyMismatched,
    StandbyWarmed,
    StepAborted,
    UserError,
    WorkerExited,
    WorkerFailed,
    WorkerFinished,
    WorkerRegistered,
    WorkerStarted,
)
from trainmover.schemas.interruptions import Interruptions
from trainmover.schemas.member import Member
from trainmover.schemas.recorded import Recorded
from trainmover.services.planner.preemption import Notice, end_of_job

PAIR_WINDOW_S = 60.0
"""A link that breaks again within this time of a relink is not bad luck: one end is replaced."""


class Phase(Enum):
    PLANNED = "planned"
    PREPARED = "prepared"
    """Of a planned switch: its joiners stand ready, or are not waited for."""
    SWITCHED = "switched"
    """The ranks were told to run; no step is committed yet."""
    RUNNING = "running"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Assignment:
    """The members of a generation and how far it came."""

    generation: int
    members: tuple[Member, ...]
    """In rank order."""
    phase: Phase
    incident: str = ""
    replacements: tuple[Replacement, ...] = ()
    leavers: tuple[Member, ...] = ()
    """Alive, and back in their ranks if this planned assignment is not switched to."""
    tries: int = 0
    """Plans in a row, this one included, with the same members and no committed step."""
    since_seq: int = 0
    """A link reported lost before this place of the stream was lost on the way here."""
    aborted: MigrationAborted | None = None


@dataclass(frozen=True, slots=True)
class Sign:
    """A sign that a generation cannot go on though nobody is known to be dead."""

    seq: int
    time_s: float
    event: PeerLost | StepAborted


@dataclass(frozen=True, slots=True)
class State:
    submitted: JobSubmitted | None = None
    submitted_s: float = 0.0
    started: bool = False
    over: bool = False

    launched: Mapping[str, WorkerStarted] = field(default_factory=dict)
    launched_s: float = 0.0
    """When the last one was."""
    registered: Mapping[str, WorkerRegistered] = field(default_factory=dict)
    """Oldest first."""
    registered_s: float = 0.0
    """When the last worker registered."""
    failed: Mapping[str, WorkerFailed] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    """Did not do their part in a migration."""
    exited: frozenset[str] = frozenset()
    """Gone; whether that is a failure is for the detector to say."""
    warmed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Standby -> the role classes that it is warm for."""
    errors: tuple[UserError, ...] = ()
    """Exceptions of user code in workers that held a rank, or before there were ranks."""

    assignments: tuple[Assignment, ...] = ()
    pending: Assignment | None = None
    """A planned switch that is not decided: `latest` is in force, and stays if it is dropped."""
    generation: int = 1
    """The highest that was planned."""
    interruptions: Interruptions = field(default_factory=Interruptions)
    attempts: Mapping[str, int] = field(default_factory=dict)
    """Leaver -> planned switches of it that came to nothing since it was last announced."""
    num_moved: int = 0
    """Workers that gave their ranks away in planned switches."""
    notices: tuple[Notice, ...] = ()
    """Of preemption, oldest first."""
    preempted: str = ""
    """Why they are the end of the job, judged when the last one came; empty: they are not."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Worker -> the rank it holds or held: it never gets another (commit.md RESET)."""
    ready: Mapping[str, int] = field(default_factory=dict)
    """Worker -> the last generation for which it was set up."""
    shards: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """Rank -> tracked name -> shard key."""
    role_classes: Mapping[int, str] = field(default_factory=dict)
    """Rank -> the class that standbys warm up for."""
    setup_since: int = 1
    """Generation in which set-up was begun for the last time."""
    finished: Mapping[str, WorkerFinished] = field(default_factory=dict)
    progress: int = 0
    """Steps that are known to be committed."""
    targets: Mapping[str, int] = field(default_factory=dict)
    """Incident -> the step from which it lets the job go on."""
    signs: tuple[Sign, ...] = ()
    """Of this generation or within `PAIR_WINDOW_S`, oldest first."""

    exhausted: frozenset[str] = frozenset()
    """Keys of the `pool.exhausted` that were said since the last plan."""
    stalled: frozenset[str] = frozenset()
    """Keys of the `job.stalled` that were said since the last plan."""
    stalled_since_s: float | None = None
    arrived: tuple[str, ...] = ()
    """Workers that registered while the pool was exhausted and are not announced yet."""

    @property
    def latest(self) -> Assignment:
        """The assignment in force. Before `layout.assigned` there is none: IndexError."""
        return self.assignments[-1]

    @property
    def members(self) -> tuple[Member, ...]:
        """Of the assignment in force; of a planned one that is not switched to, and in which
        somebody is lost or that was aborted, with the leavers back in their ranks."""
        latest = self.latest
        switched = latest.phase in (Phase.SWITCHED, Phase.RUNNING)
        lost = any(m.worker in self.unfit for m in latest.members)
        if switched or not (lost or latest.phase is Phase.ABORTED):
            return latest.members
        back = {m.rank: m for m in latest.leavers if m.worker not in self.unfit | self.exited}
        return tuple(back.get(m.rank, m) for m in latest.members)

    @property
    def unfit(self) -> frozenset[str]:
        """Workers that may not keep a rank."""
        return self.missing | self.failed.keys()

    @property
    def free(self) -> tuple[WorkerRegistered, ...]:
        """Live workers that never held a rank and stay, oldest registration first."""
        pending = {r.joiner for r in self.pending.replacements} if self.pending else set()
        return tuple(w for w in self.spare if w.worker not in pending and not self.asked(w))

    @property
    def spare(self) -> tuple[WorkerRegistered, ...]:
        """Live workers that never held a rank, of machines that are drained too."""
        gone = self.unfit | self.exited | self.ranks.keys()
        return tuple(w for name, w in self.registered.items() if name not in gone)

    @property
    def idle(self) -> set[tuple[str, str]]:
        """(worker, machine) of all that live, or were started, and never held a rank."""
        gone = self.unfit | self.exited | self.ranks.keys()
        here = [(w.worker, w.machine) for w in self.launched.values()]
        here += [(w.worker, w.machine) for w in self.registered.values()]
        return {(worker, machine) for worker, machine in here if worker not in gone}

    def asked(self, worker: Member | WorkerRegistered) -> bool:
        """Whether an interruption that stands keeps it from having a rank."""
        return bool(self.interruptions.of(worker.worker, worker.machine))


def evolve(state: State, recorded: Recorded) -> State:
    """The state after one more event of the stream."""
    match recorded.event:
        case JobSubmitted() as event:
            return replace(state, submitted=event, submitted_s=recorded.time_s)
        case JobStarted():
            return replace(state, started=True)
        case JobCompleted() | JobFailed():
            return replace(state, over=True)
        case PoolExhausted() as event:
            return replace(state, exhausted=state.exhausted | {event.key()})
        case PoolReplenished() as event:
            return replace(state, arrived=tuple(w for w in state.arrived if w != event.worker))
        case JobStalled() as event:
            since_s = recorded.time_s if state.stalled_since_s is None else state.stalled_since_s
            stalled = state.stalled | {event.key()}
            return replace(state, stalled=stalled, stalled_since_s=since_s)
        case InterruptionAnnounced() | InterruptionCancelled() as event:
            return _interrupted(state, event, recorded.time_s)
        case PeerLost() | StepAborted() as event:
            return _signed(state, Sign(recorded.seq, recorded.time_s, event))
        case _:
            return _migration(_worker(state, recorded), recorded)


def _interrupted(
    state: State, event: InterruptionAnnounced | InterruptionCancelled, time_s: float
) -> State:
    """Who is announced anew is tried anew."""
    after = state.interruptions.after(event)
    if after == state.interruptions:
        return state
    if isinstance(event, InterruptionCancelled):
        kept = tuple(n for n in state.notices if n.event.interruption != event.interruption)
        preempted = state.preempted if kept == state.notices else ""
        return replace(state, interruptions=after, notices=kept, preempted=preempted)
    members = state.latest.members if state.assignments else ()
    named = {m.worker for m in members if event.concerns(m.worker, m.machine)}
    attempts = {worker: n for worker, n in state.attempts.items() if worker not in named}
    state = replace(state, interruptions=after, attempts=attempts)
    if event.kind != "preemption":
        return state
    notices = (*state.notices, Notice(event, time_s))
    why = end_of_job(notices, after, members, state.idle)
    return replace(state, notices=notices, preempted=state.preempted or why)


def _worker(state: State, recorded: Recorded) -> State:
    match recorded.event:
        case WorkerStarted() as event:
            launched = {**state.launched, event.worker: event}
            return replace(state, launched=launched, launched_s=recorded.time_s)
        case WorkerRegistered() as event if event.worker not in state.registered:
            arrived = (*state.arrived, event.worker) if state.exhausted else state.arrived
            return replace(
                state,
                registered={**state.registered, event.worker: event},
                registered_s=recorded.time_s,
                arrived=arrived,
            )
        case WorkerExited() as event:
            return replace(state, exited=state.exited | {exit.worker for exit in event.exits})
        case WorkerFailed() as event:
            return _failed(state, event)
        case StandbyLost() as event:
            return replace(state, exited=state.exited | {event.worker})
        case StandbyWarmed() | StandbyMismatched() as event:
            others = state.warmed.get(event.worker, frozenset()) - {event.role_class}
            warm = {event.role_class} if isinstance(event, StandbyWarmed) else set()
            return replace(state, warmed={**state.warmed, event.worker: others | warm})
        case RankReady() as event:
            return replace(
                state,
                role_classes={**state.role_classes, event.rank: event.role_class},
                ready={**state.ready, event.worker: event.generation},
                shards={**state.shards, event.rank: event.shards},
            )
        case WorkerFinished() as event:
            finished = {**state.finished, event.worker: event}
            progress = max(state.progress, event.committed)
            return replace(state, finished=finished, progress=progress)
        case _:
            return state


def _failed(state: State, event: WorkerFailed) -> State:
    """Errors of a standby in shadow do not count: only who holds a rank can fail the job."""
    new = [worker for worker in event.workers if worker not in state.failed]
    ranks = {state.ranks[worker] for worker in new if worker in state.ranks}
    errors = tuple(
        error for error in event.errors if new and (not state.assignments or error.rank in ranks)
    )
    return replace(
        state,
        failed={**state.failed, **dict.fromkeys(new, event)},
        errors=(*state.errors, *errors),
    )


def _migration(state: State, recorded: Recorded) -> State:
    if not state.assignments:
        if not isinstance(recorded.event, LayoutAssigned):
            return state
        members = recorded.event.members
        return _assigned(state, Assignment(1, members, Phase.RUNNING, since_seq=recorded.seq))
    match recorded.event:
        case MigrationPlanned() as event if event.generation > state.generation:
            state = replace(_undone(state, event), generation=event.generation, pending=None)
            assignment = _planned(state, event, recorded.seq)
            if event.kind == "planned":
                return replace(state, pending=assignment, exhausted=frozenset())
            return _assigned(state, assignment)
        case MigrationPrepared(generation=g) if state.pending and g == state.pending.generation:
            return replace(state, pending=replace(state.pending, phase=Phase.PREPARED))
        case MigrationDecided() as event:
            if state.pending is not None and event.generation == state.pending.generation:
                state = _assigned(replace(state, pending=None), state.pending)
            return replace(
                state,
                targets={**state.targets, event.incident: event.target},
                progress=max(state.progress, event.target),
                setup_since=event.generation if event.setup_again else state.setup_since,
            )
        case MigrationSwitched() as event if event.generation == state.latest.generation:
            state = replace(state, num_moved=state.num_moved + len(state.latest.leavers))
            return _at(state, replace(state.latest, phase=Phase.SWITCHED, since_seq=recorded.seq))
        case MigrationCompleted() as event if event.generation == state.latest.generation:
            state = replace(state, progress=max(state.progress, event.committed))
            return _at(state, replace(state.latest, phase=Phase.RUNNING, tries=0))
        case MigrationAborted() as event if (
            state.pending is not None and event.generation == state.pending.generation
        ):
            return _dropped(state, event)
        case MigrationAborted() as event if event.generation == state.latest.generation:
            state = replace(state, missing=state.missing | set(event.missing))
            return _at(state, replace(state.latest, phase=Phase.ABORTED, aborted=event))
        case _:
            return state


def _planned(state: State, event: MigrationPlanned, seq: int) -> Assignment:
    before = state.latest
    return Assignment(
        event.generation,
        event.members,
        Phase.PLANNED,
        incident=event.incident,
        replacements=event.replacements,
        leavers=event.leavers,
        tries=before.tries + 1 if event.members == before.members else 1,
        since_seq=seq,
    )


def _dropped(state: State, event: MigrationAborted) -> State:
    """What is in force stays in force; a joiner that could not be prepared is not tried again.

    A switch that was called off was no try.
    """
    assert state.pending is not None
    leavers = state.pending.leavers
    if all(state.asked(leaver) for leaver in leavers):
        state = _tried(state, leavers)
    return replace(state, pending=None, missing=state.missing | set(event.missing))


def _undone(state: State, event: MigrationPlanned) -> State:
    """Leavers that a plan puts back into their ranks: their move was decided and failed."""
    return _tried(state, (m for m in state.latest.leavers if m in event.members))


def _tried(state: State, leavers: Iterable[Member]) -> State:
    attempts = Counter(state.attempts)
    attempts.update(leaver.worker for leaver in leavers)
    return replace(state, attempts=attempts)


def _assigned(state: State, assignment: Assignment) -> State:
    ranks = {member.worker: member.rank for member in assignment.members}
    return replace(
        state,
        assignments=(*state.assignments, assignment),
        ranks={**state.ranks, **ranks},
        exhausted=frozenset(),
        stalled=frozenset(),
        stalled_since_s=None,
    )


def _at(state: State, assignment: Assignment) -> State:
    return replace(state, assignments=(*state.assignments[:-1], assignment))


def _signed(state: State, new: Sign) -> State:
    generation = state.latest.generation if state.assignments else 0
    kept = (
        sign
        for sign in state.signs
        if sign.event.generation == generation or new.time_s - sign.time_s <= PAIR_WINDOW_S
    )
    return replace(state, signs=(*kept, new))
