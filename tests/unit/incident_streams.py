"""Streams of interruptions, as literal as they come: for whatever reads or draws them."""

from collections.abc import Iterable, Sequence
from typing import Any

from trainmover.schemas.base import Event
from trainmover.schemas.events import (
    FaultInjected,
    InterruptionAnnounced,
    JobStarted,
    JobSubmitted,
    MigrationAborted,
    MigrationCompleted,
    MigrationDecided,
    MigrationPlanned,
    MigrationPrepared,
    MigrationSwitched,
    RankTimes,
    Replacement,
    Restored,
    Source,
    WorkerFailed,
)
from trainmover.schemas.layout import Layout
from trainmover.schemas.member import Member
from trainmover.schemas.recorded import Recorded

JOB: dict[str, Any] = {"job": "j", "run": "r1"}
EPOCH = 100.0
"""Time of the stream at second 0 of a story."""
STAGES = ("collected", "obeyed", "restored", "switched", "resumed", "first_step")
"""Of a planned switch `frozen` comes before them."""


def stream(*timed: tuple[float, Event]) -> list[Recorded]:
    return [Recorded(seq, EPOCH + at, event) for seq, (at, event) in enumerate(timed, start=1)]


def submitted(num_ranks: int = 4) -> JobSubmitted:
    return JobSubmitted(
        **JOB,
        layout=Layout.parse(f"dp={num_ranks}"),
        workers_per_machine=num_ranks,
        num_standbys=1,
        script_digest="9f86d081884c7d65",
        host="m",
    )


def started() -> JobStarted:
    return JobStarted(**JOB)


def fault(worker: str = "m-w1") -> FaultInjected:
    return FaultInjected(**JOB, kind="kill", worker=worker, rank=1, step=7)


def failed(
    *workers: str, first_evidence: float = 0.02, evidence: str = "killed by SIGKILL"
) -> WorkerFailed:
    return WorkerFailed(
        **JOB,
        workers=workers or ("m-w1",),
        kind="crash",
        machine="m",
        evidence=evidence,
        reason="its agent saw it exit",
        first_evidence=EPOCH + first_evidence,
    )


def planned(
    generation: int = 2,
    replaced: Iterable[tuple[int, str, str]] = ((1, "m-w1", "m-w9"),),
    num_ranks: int = 0,
    reason: str = "rank 1 lost its worker",
) -> MigrationPlanned:
    """`replaced`: rank, leaver, joiner. Whoever stays is m-w<rank>."""
    replacements = [Replacement(rank=r, leaver=x, joiner=y) for r, x, y in replaced]
    joiners = {x.rank: x.joiner for x in replacements}
    return MigrationPlanned(
        **JOB,
        generation=generation,
        incident="g2",
        kind="crash" if replacements else "relink",
        replacements=tuple(replacements),
        members=tuple(
            Member(rank=r, worker=joiners.get(r, f"m-w{r}"), machine="m", addresses=())
            for r in range(num_ranks)
        ),
        reason=reason,
    )


def announced(*workers: str, kind: str = "rebalance", reason: str = "") -> InterruptionAnnounced:
    told = {"interruption": "move-1", "kind": kind, "workers": workers or ("m-w1",)}
    return InterruptionAnnounced.model_validate({**JOB, **told, "reason": reason})


def move(generation: int = 2, num_ranks: int = 3, incident: str = "") -> MigrationPlanned:
    """Rank 1 is to go from m-w1 to m-w9."""
    plan = planned(generation, num_ranks=num_ranks, reason="rank 1 moves from m-w1 to m-w9")
    leaver = Member(rank=1, worker="m-w1", machine="m", addresses=())
    given = {"kind": "planned", "leavers": (leaver,), "incident": incident or f"g{generation}"}
    return plan.model_copy(update=given)


def prepared(generation: int = 2, incident: str = "") -> MigrationPrepared:
    return MigrationPrepared(**JOB, generation=generation, incident=incident or f"g{generation}")


def decided(generation: int = 2, target: int = 7, **more: Any) -> MigrationDecided:
    return MigrationDecided(**JOB, generation=generation, incident="g2", target=target, **more)


def source(rank: int = 1, worker: str = "m-w9") -> Source:
    return Source(rank=rank, worker=worker, donors=("m-w0", "m-w2"), extras_from="m-w2")


def switched(generation: int = 2, **more: Any) -> MigrationSwitched:
    return MigrationSwitched(**JOB, generation=generation, incident="g2", target=7, **more)


def restored(rank: int = 1, worker: str = "m-w9") -> Restored:
    return Restored(
        rank=rank, worker=worker, donor="m-w0", num_bytes=5_200_000, seconds=0.012, digest="d"
    )


def completed(
    generation: int = 2, ranks: Sequence[RankTimes] = (), normal_step_s: float | None = None
) -> MigrationCompleted:
    return MigrationCompleted(
        **JOB,
        generation=generation,
        incident="g2",
        committed=8,
        ranks=tuple(ranks),
        normal_step_s=normal_step_s,
    )


def times(
    rank: int, worker: str, *at: float, joined: bool = False, frozen: float | None = None
) -> RankTimes:
    """`at`: seconds of the story at which the stages were reached, in their order."""
    reached = {} if frozen is None else {"frozen": EPOCH + frozen}
    reached |= {stage: EPOCH + second for stage, second in zip(STAGES, at, strict=False)}
    return RankTimes(rank=rank, worker=worker, joined=joined, reached=reached)


def aborted(
    generation: int = 2, reason: str = "m-w9 did not answer", **more: Any
) -> MigrationAborted:
    return MigrationAborted(**JOB, generation=generation, incident="g2", reason=reason, **more)


CRASH = stream(
    (0.00, fault()),
    (0.03, failed()),
    (0.05, planned(num_ranks=3)),
    (0.15, decided(sources=(source(),))),
    (0.40, switched(restored=(restored(),), links={"0": (1, 1, 0), "1": (2, 0, 0)})),
    (
        0.60,
        completed(
            ranks=(
                times(0, "m-w0", 0.06, 0.16, 0.16, 0.38, 0.41, 0.58),
                times(1, "m-w9", 0.07, 0.30, 0.35, 0.39, 0.41, 0.59, joined=True),
                times(2, "m-w2", 0.08, 0.16, 0.16, 0.38, 0.41, 0.59),
            ),
            normal_step_s=0.1,
        ),
    ),
)
"""Rank 1 of three is killed and m-w9 takes over."""
REPLANNED = stream(
    (0.0, failed(first_evidence=0.0)),
    (0.1, planned(num_ranks=3)),
    (2.0, aborted(missing=("m-w9",))),
    (2.1, planned(3, replaced=((1, "m-w1", "m-w8"),), num_ranks=3)),
    (2.5, completed(3)),
)
"""The first joiner does not answer, the second does."""
OPEN = stream((0.0, failed(first_evidence=0.0)), (0.1, planned(num_ranks=3)))
GIVEN_UP = stream((0.0, failed(first_evidence=0.0)), (0.1, planned(num_ranks=3)), (2.0, aborted()))
MOVE = stream(
    (0.0, announced()),
    (0.1, move()),
    (5.1, prepared()),
    (5.3, decided(sources=(source(),))),
    (5.4, switched(restored=(restored(),), links={"0": (1, 1, 0), "1": (2, 0, 0)})),
    (
        5.6,
        completed(
            ranks=(
                times(0, "m-w0", 5.31, 5.32, 5.32, 5.39, 5.41, 5.58, frozen=5.21),
                times(1, "m-w9", 5.32, 5.33, 5.37, 5.39, 5.42, 5.59, joined=True),
                times(2, "m-w2", 5.32, 5.33, 5.33, 5.39, 5.41, 5.59, frozen=5.2),
            ),
            normal_step_s=0.1,
        ),
    ),
)
"""Rank 1 of three moves: all stand from 5.2 s on, the first step after it is there at 5.6 s."""
MOVE_DROPPED = stream((0.0, announced()), (0.1, move()), (0.5, aborted(reason="m-w9 ended")))
MOVE_OPEN = MOVE[:3]
MOVE_SUPERSEDED = [
    *MOVE[:3],
    *stream((5.2, failed("m-w0", first_evidence=5.2))),
    *stream(
        (
            5.25,
            planned(3, ((0, "m-w0", "m-w8"),), num_ranks=3, reason="rank 0 died").model_copy(
                update={"incident": "g3"}
            ),
        )
    ),
]
MOVE_SUPERSEDED = [Recorded(i, r.time_s, r.event) for i, r in enumerate(MOVE_SUPERSEDED, start=1)]
"""Somebody dies before the decision."""
MOVE_UNDONE = [
    *MOVE[:4],
    Recorded(5, EPOCH + 5.35, failed("m-w9", first_evidence=5.33)),
    Recorded(
        6,
        EPOCH + 5.4,
        planned(3, (), num_ranks=3, reason="m-w9 was lost: m-w1 takes its rank back"),
    ),
    Recorded(7, EPOCH + 5.45, decided(3)),
    Recorded(8, EPOCH + 5.5, switched(3)),
    Recorded(
        9,
        EPOCH + 5.7,
        completed(
            3,
            ranks=[
                times(r, f"m-w{r}", 5.42, 5.46, 5.46, 5.48, 5.51, 5.68, frozen=5.2 + r / 100)
                for r in range(3)
            ],
            normal_step_s=0.1,
        ),
    ),
]
"""The joiner dies after the decision: the leaver is back in its rank."""
