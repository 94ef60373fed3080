"""One event of every type, with fixed values: a job of two ranks whose second is replaced."""

from trainmover.schemas.base import Event
from trainmover.schemas.events import (
    Exit,
    FaultInjected,
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
    RankTimes,
    Replacement,
    Restored,
    Source,
    StandbyLost,
    StandbyMismatched,
    StandbyWarmed,
    StepAborted,
    UserError,
    WorkerExited,
    WorkerFailed,
    WorkerFinished,
    WorkerRecovered,
    WorkerRegistered,
    WorkerStarted,
    WorkerSuspected,
)
from trainmover.schemas.layout import Layout
from trainmover.schemas.member import Member

TIME_S = 1_750_000_000.0
"""2025-06-15T15:06:40Z."""

_J = {"job": "llama", "run": "r1"}
_RANK_0 = Member(rank=0, worker="m1-0", machine="m1", addresses=("unix:/tmp/m1-0",))
_RANK_1 = Member(rank=1, worker="m1-1", machine="m1", addresses=("tcp:10.0.0.1:4711",))
_JOINER = Member(rank=1, worker="m2-0", machine="m2", addresses=("tcp:10.0.0.2:4711",))
_SHARDS = {"model": "", "optimizer": ""}
_ERROR = UserError(
    exception="RuntimeError",
    message="CUDA error: an illegal memory access was encountered",
    traceback="Traceback (most recent call last): ...",
    rank=1,
    step=120,
    committed=119,
)

_MIGRATION: tuple[Event, ...] = (
    FaultInjected(**_J, kind="kill", worker="m1-1", rank=1, step=120, at="backward"),
    PeerLost(**_J, worker="m1-0", peer="m1-1", generation=1, channel="ring/dp", cause="reset"),
    StepAborted(**_J, worker="m1-0", rank=0, generation=1, step=120, cause="peer m1-1 is gone"),
    WorkerExited(**_J, machine="m1", exits=(Exit(worker="m1-1", code=-9, error=_ERROR),)),
    WorkerSuspected(
        **_J,
        workers=("m1-1",),
        kind="hang",
        machine="m1",
        evidence="no progress for 8.0 s, 5 normal steps",
        enough="12 s without progress",
        first_evidence=TIME_S - 8,
    ),
    WorkerRecovered(
        **_J,
        workers=("m1-1",),
        machine="m1",
        evidence="step 120 was committed",
        first_evidence=TIME_S - 8,
    ),
    WorkerFailed(
        **_J,
        workers=("m1-1",),
        kind="crash",
        machine="m1",
        evidence="exit with signal 9",
        reason="its agent saw the process end",
        errors=(_ERROR,),
        first_evidence=TIME_S,
    ),
    MigrationPlanned(
        **_J,
        generation=2,
        incident="g2",
        kind="crash",
        replacements=(Replacement(rank=1, leaver="m1-1", joiner="m2-0"),),
        members=(_RANK_0, _JOINER),
        reason="m1-1 crashed",
    ),
    MigrationDecided(
        **_J,
        generation=2,
        incident="g2",
        target=119,
        sources=(Source(rank=1, worker="m2-0", donors=("m1-0",), extras_from="m1-0"),),
        holding=(0,),
    ),
    MigrationSwitched(
        **_J,
        generation=2,
        incident="g2",
        target=119,
        restored=(
            Restored(
                rank=1,
                worker="m2-0",
                donor="m1-0",
                num_bytes=1_048_576,
                seconds=0.031,
                digest="99aa06d3014798d86001c324468d497f",
            ),
        ),
        links={"0": (1, 1, 0), "1": (1, 0, 0)},
    ),
    MigrationCompleted(
        **_J,
        generation=2,
        incident="g2",
        committed=120,
        ranks=(
            RankTimes(
                rank=1,
                worker="m2-0",
                joined=True,
                reached={"collected": 1_790_000_000.21, "first_step": 1_790_000_000.74},
            ),
        ),
        normal_step_s=0.076,
    ),
    MigrationAborted(
        **_J,
        generation=2,
        incident="g2",
        reason="m2-0 did not restore its state within 30 s",
        missing=("m2-0",),
    ),
)

SAMPLES: tuple[Event, ...] = (
    JobSubmitted(
        **_J,
        layout=Layout.parse("dp=2"),
        workers_per_machine=2,
        num_standbys=1,
        script_digest="9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        host="m1",
    ),
    WorkerStarted(**_J, worker="m1-0", machine="m1", local_index=0, pid=4242),
    WorkerRegistered(
        **_J, worker="m1-0", machine="m1", local_index=0, addresses=("unix:/tmp/m1-0",)
    ),
    LayoutAssigned(**_J, members=(_RANK_0, _RANK_1)),
    RankReady(
        **_J,
        worker="m1-0",
        rank=0,
        generation=1,
        shards=_SHARDS,
        setup_s=0.8,
        role_class="all",
        tape="r1-1-all",
    ),
    JobStarted(**_J),
    StandbyWarmed(
        **_J,
        worker="m2-0",
        rank=1,
        warm_s=2.5,
        role_class="all",
        steps=2,
        tape="r1-1-all",
        replayed=True,
    ),
    StandbyMismatched(
        **_J,
        worker="m2-1",
        rank=1,
        role_class="all",
        tape="r1-1-all",
        reason="group 0, collective 3: expected all_reduce of float32 [8, 1], got broadcast",
    ),
    *_MIGRATION,
    InterruptionAnnounced(
        **_J,
        interruption="move-1",
        kind="maintenance",
        workers=("m1-0",),
        joiners={"m1-0": "m2-0"},
        reason="new firmware for m1",
    ),
    InterruptionCancelled(**_J, interruption="move-1", reason="m1 stays"),
    MigrationPrepared(**_J, generation=3, incident="g3"),
    StandbyLost(**_J, worker="m2-0", reason="its machine m2 is silent"),
    PoolExhausted(**_J, generation=2, needed=1, free=0),
    PoolReplenished(**_J, worker="m2-1"),
    JobStalled(
        **_J, generation=2, reason="no standby for rank 1", unblocked_by="one more warm standby"
    ),
    WorkerFinished(
        **_J,
        worker="m1-0",
        rank=0,
        generation=2,
        committed=10_000,
        digest="99aa06d3014798d86001c324468d497f",
    ),
    JobCompleted(
        **_J,
        completed_steps=10_000,
        state_digest="2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae",
    ),
    JobFailed(**_J, reason="no rank holds shard pp=1 and there is no snapshot", exit_code=4),
)
