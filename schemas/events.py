"""Every stored event of a job, one frozen model each.

A type stands once in `EVENTS`; the table is the contract, the JSON Schemas are made from it.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from trainmover.schemas.base import Event
from trainmover.schemas.layout import Layout
from trainmover.schemas.member import Member
from trainmover.schemas.names import Name

Text = Annotated[str, Field(max_length=16_384)]
"""Bounded: a burst of huge error texts must not hurt a service."""


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
    """1 user code, 3 stalled too long, 4 state lost, 5 no progress."""

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
    TYPE = "standby.warmed"
    worker: Name
    rank: NonNegativeInt
    """The rank it stood in for while it warmed up."""
    warm_s: Annotated[float, Field(ge=0)]

    def key(self) -> str:
        return f"{self.worker}/{self.rank}"


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
    """Workers that are to give their ranks to standbys while training goes on."""

    TYPE = "interruption.announced"
    interruption: Name
    """Unique in the run; who announces chooses it, and says it again under the same name."""
    kind: Literal["maintenance", "preemption", "rebalance"]
    workers: Annotated[tuple[Name, ...], Field(min_length=1)]
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
    num_bytes: NonNegativeInt
    seconds: Annotated[float, Field(ge=0)]
    digest: str
    """xxh3-128 of the shared state, equal on donor and joiner."""


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
        StandbyLost,
        WorkerFailed,
        WorkerSuspected,
        WorkerRecovered,
        InterruptionAnnounced,
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
