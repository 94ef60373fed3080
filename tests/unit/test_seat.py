"""Which orders a worker still has to obey."""

import pytest

from trainmover.runtime import commit
from trainmover.runtime.attempt import Attempt
from trainmover.runtime.commit import Phase, Position
from trainmover.runtime.seat import Orders, Role, Seat
from trainmover.schemas.commands import Collect, Decided, Resume, Retire, Stage
from trainmover.schemas.layout import Layout


def decided(generation: int, *, setup_again: bool = False) -> Decided:
    return Decided(
        generation=generation,
        layout=Layout.parse("dp=3"),
        members=(),
        placement=(),
        target=1,
        setup_again=setup_again,
    )


@pytest.fixture
def running() -> Seat:
    """Recovered once, runs in generation 2 and has voted in step 3."""
    seat = Seat("a", lambda: None)
    seat.position = Position(
        generation=2, phase=Phase.VOTED, committed=3, extras=4, promised=2, ready_for=2
    )
    seat.orders, seat.stage = Orders(about=2, decided=decided(2)), Stage.RESUMED
    return seat


def test_a_vote_that_is_cut_off_is_held_although_an_older_decision_is_filed(running: Seat) -> None:
    assert running.move(commit.failed).phase is Phase.HOLDING
    assert running.decided is None


def test_a_decision_to_set_up_again_does_not_undo_the_set_up_that_it_led_to(running: Seat) -> None:
    running.orders.decided = decided(2, setup_again=True)
    assert running.decided is None


def test_a_repeated_decision_of_the_running_generation_is_not_obeyed_again(running: Seat) -> None:
    running.order(decided(2))
    assert running.decided is None


def test_the_decision_of_the_promised_generation_is_the_one_to_obey(running: Seat) -> None:
    running.collect(Collect(generation=3, assignment="x"), lambda generation: None)
    assert running.decided is None
    running.order(decided(3))
    assert running.decided == decided(3)


def test_another_assignment_for_a_promised_generation_is_refused(running: Seat) -> None:
    running.collect(Collect(generation=3, assignment="x"), lambda generation: None)
    answer = running.collect(Collect(generation=3, assignment="y"), lambda generation: None)
    assert "assignment" in answer.refused
    assert running.answer().refused == ""


def test_what_was_reached_is_said_with_its_time_and_forgotten_by_the_next_incident(
    running: Seat,
) -> None:
    running.collect(Collect(generation=3, assignment="x", incident="g3"), lambda generation: None)
    assert list(running.answer().reached) == ["collected"]
    running.reach(Stage.RESTORED, 3)  # it was clean: nothing to pull
    running.reach(Stage.SWITCHED, 2)  # of an older plan
    assert list(running.answer().reached) == ["collected", "obeyed", "restored"]
    running.order(Resume(generation=3, target=4))
    running.reach(Stage.SWITCHED, 3)
    running.position = Position(generation=3, phase=Phase.COMPUTING, committed=4, promised=3)
    running.reach(Stage.RESUMED, 3)
    assert "first_step" not in running.answer().reached
    running.move(lambda p: p._replace(committed=5))
    reached = running.answer().reached
    assert list(reached)[-3:] == ["switched", "resumed", "first_step"]
    assert list(reached.values()) == sorted(reached.values())
    running.collect(Collect(generation=4, assignment="y", incident="g4"), lambda generation: None)
    assert list(running.answer().reached) == ["collected"]
    assert running.incident == "g4"


def collect(seat: Seat, generation: int, incident: str) -> None:
    command = Collect(generation=generation, assignment=str(generation), incident=incident)
    seat.collect(command, lambda _: None)


def test_an_attempt_is_told_when_it_is_superseded_and_when_its_first_step_is_committed(
    running: Seat,
) -> None:
    told = list[Attempt]()
    running.over = told.append
    running.role = Role(rank=1, layout=Layout.parse("dp=3"), generation=1)
    collect(running, 3, "g3")
    collect(running, 3, "g3")  # asked again
    assert told == []
    collect(running, 4, "g3")
    assert [(a.generation, list(a.reached)) for a in told] == [(3, ["collected"])]
    assert told[0].error == "superseded by generation 4"
    running.order(Resume(generation=4, target=4))
    running.position = Position(generation=4, phase=Phase.COMPUTING, committed=5, promised=4)
    running.reach(Stage.RESUMED, 4)
    running.move(lambda p: p._replace(committed=6))
    running.retire(Retire(reason="the job is over"))
    assert [(a.incident, a.generation, a.rank, a.error) for a in told[1:]] == [("g3", 4, 1, "")]
    assert list(told[1].reached)[-1] == "first_step"
    assert running.incident == ""


def test_an_attempt_that_the_end_of_the_job_cuts_short_says_so(running: Seat) -> None:
    told = list[Attempt]()
    running.over = told.append
    running.retire(Retire(reason="none is under way"))
    assert told == []
    collect(running, 3, "g3")
    running.retire(Retire(reason="the job is over"))
    assert [(a.rank, a.error) for a in told] == [(None, "the job is over")]
