"""What a step normally takes: told by the ranks, so that everybody subtracts the same."""

import pytest
from tests.unit.incident_streams import JOB, planned, submitted

from trainmover.runtime import pace
from trainmover.runtime.commit import Phase, Position
from trainmover.runtime.seat import Seat
from trainmover.schemas.commands import Answer, Collect
from trainmover.services.mover.migration import Migration


class Clock:
    def __init__(self) -> None:
        self.now_s = 50.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(pace, "time", made)
    return made


def commit_after(seat: Seat, clock: Clock, *seconds: float) -> None:
    for one in seconds:
        clock.now_s += one
        seat.move(lambda p: p._replace(committed=p.committed + 1))


def collect(seat: Seat, generation: int) -> Answer:
    command = Collect(generation=generation, assignment="x", incident=f"g{generation}")
    return seat.collect(command, lambda generation: None)


@pytest.fixture
def seat() -> Seat:
    made = Seat("a", lambda: None)
    made.position = Position(generation=1, phase=Phase.COMPUTING, promised=1)
    return made


def test_it_is_the_median_time_between_two_commits_before_the_collect(
    seat: Seat, clock: Clock
) -> None:
    commit_after(seat, clock, 9.0, 0.1, 0.2, 0.3, 0.2)
    assert collect(seat, 2).normal_step_s == pytest.approx(0.2)


def test_a_rank_that_has_committed_one_step_cannot_tell(seat: Seat, clock: Clock) -> None:
    commit_after(seat, clock, 9.0)
    assert collect(seat, 2).normal_step_s is None


def test_the_interruption_itself_is_no_step(seat: Seat, clock: Clock) -> None:
    commit_after(seat, clock, 1.0, 0.1)
    collect(seat, 2)
    seat.position = Position(generation=2, phase=Phase.COMPUTING, committed=2, promised=2)
    commit_after(seat, clock, 60.0, 0.3)
    assert seat.answer().normal_step_s == pytest.approx(0.1)  # of the incident that is told of
    assert collect(seat, 3).normal_step_s == pytest.approx(0.2)


@pytest.mark.parametrize(("told", "normal"), [((0.1, None, 0.3), 0.2), ((None, None, None), None)])
def test_the_migration_has_the_median_of_the_ranks_that_can_tell(
    told: tuple[float | None, ...], normal: float | None
) -> None:
    plan = planned(num_ranks=3)
    migration = Migration(
        spec=submitted(3),
        plan=plan,
        placement=("m", "m", "m"),
        settled=frozenset({"m-w0", "m-w2"}),
        answers={
            member.worker: Answer(worker=member.worker, committed=8, normal_step_s=one)
            for member, one in zip(plan.members, told, strict=True)
        },
    )
    completed = migration.completed()
    assert completed.normal_step_s == (None if normal is None else pytest.approx(normal))
    assert (completed.job, completed.incident) == (JOB["job"], "g2")
