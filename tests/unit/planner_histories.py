"""The events of a small job, short to write, and the planner's outputs over them."""

from collections.abc import Sequence
from typing import Literal

from trainmover.schemas.base import Event
from trainmover.schemas.events import (
    InterruptionAnnounced,
    InterruptionCancelled,
    JobFailed,
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
    RankReady,
    Replacement,
    StepAborted,
    UserError,
    WorkerFailed,
    WorkerFinished,
    WorkerRegistered,
    WorkerStarted,
)
from trainmover.schemas.layout import Layout
from trainmover.schemas.member import Member
from trainmover.schemas.recorded import Recorded
from trainmover.services.contract import Inputs
from trainmover.services.planner.decide import SERVICE, decide
from trainmover.services.planner.state import State, evolve

J = {"job": "j", "run": "r1"}


def submitted(layout: str = "dp=3", **more: object) -> JobSubmitted:
    return JobSubmitted.model_validate(
        {
            **J,
            "layout": Layout.parse(layout),
            "workers_per_machine": 3,
            "num_standbys": 1,
            "script_digest": "d",
            "host": "h",
            **more,
        }
    )


def launched(worker: str, index: int, machine: str = "m0") -> WorkerStarted:
    return WorkerStarted(**J, worker=worker, machine=machine, local_index=index, pid=7)


def registered(worker: str, index: int, machine: str = "m0") -> WorkerRegistered:
    return WorkerRegistered(
        **J,
        worker=worker,
        machine=machine,
        local_index=index,
        addresses=(f"unix:/{worker}",),
    )


def member(rank: int, worker: str, machine: str = "m0") -> Member:
    return Member(rank=rank, worker=worker, machine=machine, addresses=(f"unix:/{worker}",))


def failed(
    *workers: str,
    kind: Literal["crash", "machine_lost"] = "crash",
    machine: str = "m0",
    errors: tuple[UserError, ...] = (),
) -> WorkerFailed:
    return WorkerFailed(
        **J,
        workers=workers,
        kind=kind,
        machine=machine,
        evidence="killed by SIGKILL",
        reason="",
        errors=errors,
        first_evidence=1.0,
    )


def error(rank: int | None, step: int = 7, committed: int = 7, exception: str = "E") -> UserError:
    return UserError(
        exception=exception,
        message="no",
        traceback="the traceback",
        rank=rank,
        step=step,
        committed=committed,
    )


def aborted(generation: int, *missing: str, state_lost: bool = False) -> MigrationAborted:
    return MigrationAborted(
        **J,
        generation=generation,
        incident="g2",
        reason="too late",
        missing=missing,
        state_lost=state_lost,
    )


def decided(
    generation: int, target: int, incident: str = "g2", setup_again: bool = False
) -> MigrationDecided:
    return MigrationDecided(
        **J, generation=generation, incident=incident, target=target, setup_again=setup_again
    )


def switched(generation: int) -> MigrationSwitched:
    return MigrationSwitched(**J, generation=generation, incident="g2", target=7)


def completed(generation: int, incident: str = "g2", committed: int = 8) -> MigrationCompleted:
    return MigrationCompleted(**J, generation=generation, incident=incident, committed=committed)


def peer_lost(worker: str, peer: str, generation: int = 1) -> PeerLost:
    return PeerLost(**J, worker=worker, peer=peer, generation=generation, channel="c", cause="EOF")


def step_aborted(worker: str, generation: int = 1) -> StepAborted:
    return StepAborted(**J, worker=worker, rank=0, generation=generation, step=7, cause="EOF")


def ready(worker: str, rank: int, generation: int = 1) -> RankReady:
    return RankReady(**J, worker=worker, rank=rank, generation=generation, shards={})


def finished(
    worker: str, rank: int, generation: int = 1, committed: int = 10, digest: str = ""
) -> WorkerFinished:
    return WorkerFinished(
        **J,
        worker=worker,
        rank=rank,
        generation=generation,
        committed=committed,
        digest=digest or f"d{rank}",
    )


def announced(*workers: str, name: str = "move-1", **more: object) -> InterruptionAnnounced:
    given = {"interruption": name, "kind": "maintenance", "workers": workers, **more}
    return InterruptionAnnounced.model_validate({**J, **given})


def cancelled(name: str = "move-1", reason: str = "") -> InterruptionCancelled:
    return InterruptionCancelled(**J, interruption=name, reason=reason)


def prepared(generation: int, *unready: str) -> MigrationPrepared:
    return MigrationPrepared(**J, generation=generation, incident="g2", unready=unready)


def fold(*timed: tuple[float, Event]) -> State:
    state = SERVICE.initial
    for seq, (time_s, event) in enumerate(timed, 1):
        state = evolve(state, Recorded(seq=seq, time_s=time_s, event=event))
    return state


def outputs(state: State, now_s: float = 100.0) -> Sequence[Event]:
    return decide(state, Inputs(now_s=now_s, up_since_s=0.0))


A, B, C = member(0, "a"), member(1, "b"), member(2, "c")
ASSIGNED = LayoutAssigned(**J, members=(A, B, C))
GROUND: tuple[tuple[float, Event], ...] = (
    (0.0, submitted()),
    *((1.0, registered(worker, index)) for index, worker in enumerate("abc")),
    (1.0, ASSIGNED),
    (2.0, JobStarted(**J)),
)
"""Three ranks that run on a, b, c, and no standby."""


def running(*timed: tuple[float, Event], standbys: str = "") -> State:
    free = ((3.0, registered(worker, 3 + i)) for i, worker in enumerate(standbys))
    return fold(*GROUND, *free, *timed)


def plan(
    generation: int,
    *replacements: tuple[int, str, str],
    members: tuple[Member, ...],
    reason: str,
    incident: str = "g2",
) -> MigrationPlanned:
    return MigrationPlanned(
        **J,
        generation=generation,
        incident=incident,
        kind="crash" if replacements else "relink",
        replacements=tuple(Replacement(rank=r, leaver=x, joiner=y) for r, x, y in replacements),
        members=members,
        reason=reason,
    )


B_TO_D = plan(
    2,
    (1, "b", "d"),
    members=(A, member(1, "d"), C),
    reason="rank 1 lost its worker b (crash: killed by SIGKILL), d takes over",
)


def only(events: Sequence[Event]) -> Event:
    (event,) = events
    return event


def the_plan(events: Sequence[Event]) -> MigrationPlanned:
    event = only(events)
    assert isinstance(event, MigrationPlanned)
    return event


def the_failure(events: Sequence[Event]) -> JobFailed:
    event = only(events)
    assert isinstance(event, JobFailed)
    return event
