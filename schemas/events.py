"""Every stored event of a job, one frozen model each.

A type stands once in `EVENTS`; the table is the contract, the JSON Schemas are made from it.
"""

from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from trainmover.schemas.base import Event
from trainmover.schemas.layout import Layout
from trainmover.schemas.member import Member
from trainmover.schemas.names import Name
from trainmover.schemas.roles import MAX_NAME_CHARS

Text = Annotated[str, Field(max_length=16_384)]
"""Bounded: a burst of huge error texts must not hurt a service."""


RoleClassName = Annotated[str, Field(max_length=MAX_NAME_CHARS)]


class Part(BaseModel):
    """A value inside an event."""

    model_config = ConfigDict(frozen=True, extra="ignore")


# ---- job


class JobSubmitted(Event):
    TYPE = "job.submitted"
    layout: Layout
    workers_per_machine: PositiveInt
    num_standbys: NonNegativeInt
    unit: Literal["worker", "machine"] = "worker"
    num_threads: PositiveInt = 1
    hash_seed: NonNegativeInt = 0
    script_digest: str
    """sha256 over script, arguments and layout: another digest may not join this run."""
    host: str
    """Where the job was submitted, for the message that refuses a second one."""
    max_incidents: PositiveInt = 3
    max_failures: NonNegativeInt | None = None
    max_planned: NonNegativeInt | None = None
    warm_up: bool = True
    """Standbys run `train` before they are needed."""
    stall_timeout_s: Annotated[float, Field(gt=0)] = 3600.0

    def key(self) -> str:
        return self.run


class LayoutAssigned(Event):
    """Generation 1: which worker starts with which rank."""

    TYPE = "layout.assigned"
    generation: Literal[1] = 1
    members: tuple[Member, ...]

    def key(self) -> str:
        return "1"


class JobStarted(Event):
    TYPE = "job.started"

    def key(self) -> str:
        return "1"


class JobCompleted(Event):
    TYPE = "job.completed"
    completed_steps: NonNegativeInt
    state_digest: str
    """sha256 over the tracked state of every rank, in rank order."""

    def key(self) -> str:
        return "1"


class JobFailed(Event):
    TYPE = "job.failed"
    reason: Text
    exit_code: PositiveInt
    """1 user code, 3 stalled too long, 4 state lost, 5 no progress, 143 ended from outside."""

    def key(self) -> str:
        return "1"


class JobStalled(Event):
    TYPE = "job.stalled"
    generation: PositiveInt
    reason: Text
    unblocked_by: Text

    def key(self) -> str:
        return f"{self.generation}/{self.reason}"


# ---- workers


class WorkerStarted(Event):
    TYPE = "worker.started"
    worker: Name
    machine: Name
    local_index: NonNegativeInt
    pid: PositiveInt

    def key(self) -> str:
        return self.worker


class UserError(Part):
    """An exception that left user code."""

    exception: str
    message: Text
    traceback: Text
    rank: NonNegativeInt | None
    step: NonNegativeInt
    committed: NonNegativeInt


class Exit(Part):
    worker: Name
    code: int
    """Exit code, or minus the signal's number as `subprocess` has it."""
    error: UserError | None = None


class WorkerExited(Event):
    """All exits of one machine within the same 10 ms."""

    TYPE = "worker.exited"
    machine: Name
    exits: Annotated[tuple[Exit, ...], Field(min_length=1)]

    def key(self) -> str:
        return "+".join(e.worker for e in self.exits)


class WorkerRegistered(Event):
    """The runtime inside the worker listens and can be commanded."""

    TYPE = "worker.registered"
    worker: Name
    machine: Name
    local_index: NonNegativeInt
    addresses: tuple[str, ...]
    labels: dict[str, str] = Field(default_factory=dict)

    def key(self) -> str:
        return self.worker


class RankReady(Event):
    """Set-up and shadow steps are done; `shards` says who can be whose donor."""

    TYPE = "rank.ready"
    worker: Name
    rank: NonNegativeInt
    generation: PositiveInt
    shards: dict[str, str]
    """Name of a tracked object -> key of the shard this rank holds of it."""
    setup_s: Annotated[float, Field(ge=0)] = 0.0
    bound: Literal["set-up", "again", "rebound"] = "set-up"
    """A joiner ran `train` again for its rank, or its parked call went on (`rebindable`)."""
    role_class: RoleClassName = ""
    """Of the rank; empty in a stream of before there were any."""
    tape: Text = ""
    """Name of what it recorded for the standbys of its role class; empty: it recorded nothing."""

    def key(self) -> str:
        return f"{self.worker}/{self.generation}"


class WorkerFinished(Event):
    TYPE = "worker.finished"
    worker: Name
    rank: NonNegativeInt
    generation: PositiveInt
    committed: NonNegativeInt
    digest: str

    def key(self) -> str:
        return f"{self.worker}/{self.generation}"


class PeerLost(Event):
    """A link to worker `peer` broke in `generation`."""

    TYPE = "peer.lost"
    worker: Name
    peer: Name
    generation: PositiveInt
    channel: str
    cause: Text

    def key(self) -> str:
        return f"{self.worker}/{self.peer}/{self.generation}"


class StepAborted(Event):
    TYPE = "step.aborted"
    worker: Name
    rank: NonNegativeInt
    generation: PositiveInt
    step: NonNegativeInt
    cause: Text

    def key(self) -> str:
        return f"{self.worker}/{self.generation}/{self.step}"


class StandbyWarmed(Event):
    """Once for each role class, in the last of which it stays."""

    TYPE = "standby.warmed"
    worker: Name
    rank: NonNegativeInt
    """The rank it stood in for while it warmed up."""
    warm_s: Annotated[float, Field(ge=0)]
    role_class: RoleClassName = ""
    steps: NonNegativeInt = 0
    """Shadow steps it took."""
    tape: Text = ""
    """Name of the tape it was given; empty: none."""
    replayed: bool = False
    """The tape answered for the other ranks; else the groups did by themselves."""
    resident: bool = True
    """It stays in this role class."""

    def key(self) -> str:
        return "/".join(filter(None, (self.worker, str(self.rank), self.tape)))


class StandbyMismatched(Event):
    """`train` does other collectives than were recorded: the worker is cold for the role class."""

    TYPE = "standby.mismatched"
    worker: Name
    rank: NonNegativeInt
    role_class: RoleClassName
    tape: Text
    reason: Text
    """The first operation that differs."""

    def key(self) -> str:
        return f"{self.worker}/{self.rank}/{self.tape}"


class StandbyLost(Event):
    TYPE = "standby.lost"
    worker: Name
    reason: Text

    def key(self) -> str:
        return self.worker


# ---- detector

FailureKind = Literal[
    "crash", "hang", "stopped", "partition", "machine_lost", "unhealthy", "corrupt"
]


class WorkerFailed(Event):
    """The detector's verdict; several workers when one machine or one moment took them."""

    TYPE = "worker.failed"
    workers: Annotated[tuple[Name, ...], Field(min_length=1)]
    kind: FailureKind
    machine: Name
    evidence: Text
    reason: Text
    errors: tuple[UserError, ...] = ()
    first_evidence: float
    """Stream time of the first sign, seconds since 1970."""

    def key(self) -> str:
        return "+".join(self.workers)


class WorkerSuspected(Event):
    TYPE = "worker.suspected"
    workers: Annotated[tuple[Name, ...], Field(min_length=1)]
    kind: FailureKind
    machine: Name
    evidence: Text
    enough: Text
    """What would be enough to call it failed."""
    first_evidence: float

    def key(self) -> str:
        return f"{'+'.join(self.workers)}/{self.first_evidence:.6f}"


class WorkerRecovered(Event):
    TYPE = "worker.recovered"
    workers: Annotated[tuple[Name, ...], Field(min_length=1)]
    machine: Name
    evidence: Text
    first_evidence: float

    def key(self) -> str:
        return f"{'+'.join(self.workers)}/{self.first_evidence:.6f}"


# ---- interruptions that are known beforehand


class InterruptionAnnounced(Event):
    """Workers, or all of a machine, that are to give their ranks to standbys as training goes on.

    Until it is cancelled none of them is given a rank, by no other plan either. Whoever can sign
    an event may announce.
    """

    TYPE = "interruption.announced"
    interruption: Name
    """Unique in the run; who announces chooses it, and says it again under the same name."""
    kind: Literal["maintenance", "preemption", "rebalance"]
    workers: tuple[Name, ...] = ()
    machine: Name | None = None
    """Every rank that is there moves."""
    deadline: float | None = None
    """When they are gone at the latest, seconds since 1970 by the clock of the stream."""
    joiners: dict[Name, Name] = Field(default_factory=dict)
    """Leaver -> the standby that is to take its rank; for others the planner chooses."""
    reason: Text = ""

    @model_validator(mode="after")
    def _names_somebody(self) -> Self:
        if not self.workers and self.machine is None:
            raise ValueError("expected workers or a machine, got neither: say who is to leave")
        return self

    def key(self) -> str:
        return self.interruption

    def concerns(self, worker: str, machine: str) -> bool:
        """Whether it names this worker, or the machine that it is on."""
        return worker in self.workers or machine == self.machine


class InterruptionCancelled(Event):
    """Nobody has to leave for it any more; what is decided already goes on."""

    TYPE = "interruption.cancelled"
    interruption: Name
    reason: Text = ""

    def key(self) -> str:
        return self.interruption


# ---- migrations


class Replacement(Part):
    rank: NonNegativeInt
    leaver: Name
    joiner: Name


class MigrationPlanned(Event):
    """The only source of a generation. Without replacements it relinks the same workers."""

    TYPE = "migration.planned"
    generation: Annotated[int, Field(ge=2)]
    incident: Name
    """The generation that the first plan of this interruption has, as `g2`."""
    kind: Literal["crash", "relink", "planned"]
    """Planned: training goes on until the joiners are prepared, and only `migration.decided`
    puts this assignment in force."""
    replacements: tuple[Replacement, ...]
    members: tuple[Member, ...]
    leavers: tuple[Member, ...] = ()
    """Alive, and the donors of their joiners. Of planned ones only."""
    reason: Text
    sources: tuple[Literal["leaver", "replica", "snapshot", "checkpoint"], ...] = ("replica",)

    def key(self) -> str:
        return str(self.generation)


class MigrationPrepared(Event):
    """The joiners of a planned switch stand ready with their links open; training went on."""

    TYPE = "migration.prepared"
    generation: Annotated[int, Field(ge=2)]
    incident: Name
    unready: tuple[Name, ...] = ()
    """Joiners that the deadline does not leave the time to wait for: the ranks stop all the
    same, and these are set up while they stand."""

    def key(self) -> str:
        return str(self.generation)


class Source(Part):
    """Where a joiner or a dirty rank takes its state from."""

    rank: NonNegativeInt
    worker: Name
    donors: tuple[Name, ...]
    """Candidates for the shared state, best first; the one that serves acknowledged clean."""
    extras_from: Name | None
    """Buddy that keeps the rank's own state; None: its own copy is right."""


class MigrationDecided(Event):
    """The verdict on the open step: every member continues from `target` committed steps."""

    TYPE = "migration.decided"
    generation: Annotated[int, Field(ge=2)]
    incident: Name
    target: NonNegativeInt
    setup_again: bool = False
    """No step was committed and set-up was cut: every member runs `train` from the top."""
    sources: tuple[Source, ...] = ()
    dirty: tuple[NonNegativeInt, ...] = ()
    holding: tuple[NonNegativeInt, ...] = ()
    """Ranks that had voted and did not know the result."""

    def key(self) -> str:
        return str(self.generation)


class Restored(Part):
    rank: NonNegativeInt
    worker: Name
    donor: Name
    """The first of its donors."""
    num_bytes: NonNegativeInt
    seconds: Annotated[float, Field(ge=0)]
    digest: str
    """xxh3-128 of the shared state, equal on its donors and the joiner."""
    donors: dict[Name, NonNegativeInt] = Field(default_factory=dict)
    """Worker -> bytes that came from it; some gave none, but their digest."""


class MigrationSwitched(Event):
    """Durable before the first resume: from here only forward."""

    TYPE = "migration.switched"
    generation: Annotated[int, Field(ge=2)]
    incident: Name
    target: NonNegativeInt
    total: NonNegativeInt | None = None
    """Updates of the loop, as the member that knows of the earliest end has it."""
    restored: tuple[Restored, ...] = ()
    links: dict[str, tuple[int, int, int]] = Field(default_factory=dict)
    """Rank -> links opened, closed, kept."""

    def key(self) -> str:
        return str(self.generation)


class RankTimes(Part):
    """What one rank went through in a migration."""

    rank: NonNegativeInt
    worker: Name
    joined: bool
    """Its worker is new in this rank."""
    reached: dict[str, float]
    """frozen (of a planned switch), collected, obeyed, restored, switched, resumed, first_step ->
    seconds since 1970, by the worker's clock."""


class MigrationCompleted(Event):
    """The first committed step after the interruption (or the end of the job) was reached."""

    TYPE = "migration.completed"
    generation: Annotated[int, Field(ge=2)]
    incident: Name
    committed: NonNegativeInt
    ranks: tuple[RankTimes, ...] = ()
    normal_step_s: Annotated[float, Field(ge=0)] | None = None
    """What a step took before the interruption, median of the ranks that can tell."""

    def key(self) -> str:
        return str(self.generation)


class MigrationAborted(Event):
    TYPE = "migration.aborted"
    generation: Annotated[int, Field(ge=2)]
    incident: Name
    reason: Text
    missing: tuple[Name, ...] = ()
    """Members that did not do their part by the deadline: leavers of the next plan."""
    state_lost: bool = False

    def key(self) -> str:
        return str(self.generation)


# ---- pool, faults


class PoolExhausted(Event):
    TYPE = "pool.exhausted"
    generation: PositiveInt
    needed: NonNegativeInt
    free: NonNegativeInt

    def key(self) -> str:
        return f"{self.generation}/{self.needed}/{self.free}"


class PoolReplenished(Event):
    TYPE = "pool.replenished"
    worker: Name

    def key(self) -> str:
        return self.worker


class FaultInjected(Event):
    TYPE = "fault.injected"
    kind: Literal["kill", "stop", "hang", "slow", "partition", "cut"]
    worker: Name
    rank: NonNegativeInt | None = None
    step: NonNegativeInt | None = None
    at: str = ""

    def key(self) -> str:
        return f"{self.worker}/{self.kind}/{self.step}/{self.at}"


EVENTS: dict[str, type[Event]] = {
    model.TYPE: model
    for model in (
        JobSubmitted,
        LayoutAssigned,
        JobStarted,
        JobCompleted,
        JobFailed,
        JobStalled,
        WorkerStarted,
        WorkerExited,
        WorkerRegistered,
        RankReady,
        WorkerFinished,
        PeerLost,
        StepAborted,
        StandbyWarmed,
        StandbyMismatched,
        StandbyLost,
        WorkerFailed,
        WorkerSuspected,
        WorkerRecovered,
        InterruptionAnnounced,
        InterruptionCancelled,
        MigrationPlanned,
        MigrationPrepared,
        MigrationDecided,
        MigrationSwitched,
        MigrationCompleted,
        MigrationAborted,
        PoolExhausted,
        PoolReplenished,
        FaultInjected,
    )
}

ONCE_ONLY: tuple[str, ...] = (
    "job.submitted",
    "layout.assigned",
    "job.started",
    "job.completed",
    "job.failed",
    "migration.planned",
    "migration.prepared",
    "migration.decided",
    "migration.switched",
    "migration.completed",
    "migration.aborted",
)
"""Published with `Nats-Expected-Last-Subject-Sequence`: who loses reads the winner's."""
