"""Which orders a worker still has to obey."""

import pytest

from trainmover.runtime import commit
from trainmover.runtime.attempt import Attempt
from trainmover.runtime.commit import Phase, Position
from trainmover.runtime.seat import Orders, Role, Seat
from trainmover.schemas.commands import (
    Collect,
    Decided,
    Drop,
    Freeze,
    Prepare,
    Resume,
    Retire,
    Stage,
)
from trainmover.schemas.layout import Layout
from trainmover.schemas.member import Member


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


# ---- a planned switch


def prepare(generation: int) -> Prepare:
    layout = Layout.parse("dp=3")
    return Prepare(generation=generation, layout=layout, members=(), placement=(), joiners=(1,))


def drop(generation: int) -> Drop:
    return Drop(generation=generation, reason="test")


@pytest.fixture
def standby() -> Seat:
    return Seat("d", lambda: None)


def test_a_joiner_has_to_prepare_until_it_is_prepared_or_cannot_be(standby: Seat) -> None:
    standby.plan(prepare(2))
    assert standby.ahead.due == prepare(2)
    standby.ready_ahead(2)
    assert standby.ahead.due is None
    standby.plan(prepare(2))  # asked again
    assert standby.ahead.due is None
    assert standby.answer().prepared == 2
    standby.plan(prepare(3))
    assert standby.answer().prepared == 0
    standby.cannot_prepare(3, "nobody answers")
    standby.plan(prepare(3))
    assert standby.ahead.due is None
    assert standby.answer().prepare_error == "nobody answers"


def test_an_older_plan_neither_replaces_a_newer_one_nor_makes_it_ready(standby: Seat) -> None:
    standby.plan(prepare(3))
    standby.plan(prepare(2))
    assert standby.ahead.due == prepare(3)
    standby.ready_ahead(2)
    standby.cannot_prepare(2, "late")
    assert standby.ahead.due == prepare(3)


@pytest.mark.parametrize("prepared", [True, False])
def test_a_plan_that_is_dropped_is_forgotten_and_not_prepared_again(
    standby: Seat, prepared: bool
) -> None:
    standby.plan(prepare(2))
    if prepared:
        standby.ready_ahead(2)
    standby.drop(drop(2))
    answer = standby.answer()
    assert (answer.prepared, answer.prepare_error, answer.dropped) == (0, "", 2)
    standby.plan(prepare(2))
    assert standby.ahead.due is None
    standby.plan(prepare(3))
    standby.drop(drop(2))  # told again
    assert standby.ahead.due == prepare(3)


def test_nothing_is_prepared_for_a_generation_that_is_decided_by_now(standby: Seat) -> None:
    collect(standby, 3, "g3")
    standby.plan(prepare(3))
    standby.plan(Freeze(generation=3))
    assert standby.ahead.due is None
    assert standby.freeze() == 0


def computing(freeze: int = 0) -> Seat:
    seat = Seat("a", lambda: None)
    seat.position = Position(
        generation=1, phase=Phase.COMPUTING, committed=3, extras=3, promised=1, freeze=freeze
    )
    return seat


def committed(seat: Seat) -> Phase:
    """One step, in whose vote the rank says what it was asked for."""
    freeze = seat.freeze()
    seat.move(commit.gathered)
    seat.move(commit.voted)
    step = seat.position.committed
    seat.move(lambda p: commit.result(p, 1, step, True, freeze))
    return seat.move(lambda p: commit.applied(p, poisoned=False, last=False)).phase


def test_a_rank_that_is_asked_to_freeze_says_so_in_its_next_vote_and_stands_after_it() -> None:
    seat = computing()
    assert committed(seat) is Phase.COMPUTING
    seat.plan(Freeze(generation=2))
    assert seat.answer().frozen == 0
    assert committed(seat) is Phase.FROZEN
    assert (seat.answer().frozen, seat.answer().committed, seat.answer().running) == (2, 5, 1)


def test_who_stands_frozen_goes_on_where_it_stands_when_the_plan_is_dropped() -> None:
    seat = computing()
    seat.plan(Freeze(generation=2))
    committed(seat)
    seat.drop(drop(2))
    assert (seat.position.phase, seat.position.committed) == (Phase.COMPUTING, 4)
    seat.plan(Freeze(generation=2))  # REMEMBER: it comes late
    assert committed(seat) is Phase.COMPUTING
    seat.plan(Freeze(generation=3))
    assert committed(seat) is Phase.FROZEN


def test_the_drop_of_a_newer_plan_frees_who_missed_that_of_an_older_one() -> None:
    seat = computing()
    seat.plan(Freeze(generation=2))
    committed(seat)
    seat.drop(drop(3))
    assert seat.position.phase is Phase.COMPUTING


def test_the_drop_of_an_older_plan_frees_nobody_from_a_newer_one() -> None:
    seat = computing()
    seat.plan(Freeze(generation=3))
    committed(seat)
    seat.drop(drop(2))
    assert seat.answer().frozen == 3


def test_a_drop_that_comes_after_the_collect_changes_nothing() -> None:
    seat = computing()
    seat.plan(Freeze(generation=2))
    committed(seat)
    collect(seat, 2, "g2")
    seat.drop(drop(2))
    assert (seat.position.phase, seat.position.promised) == (Phase.FROZEN, 2)
    assert seat.answer().dropped == 0
    assert seat.answer().stage is Stage.COLLECTED


def test_a_collect_tells_since_when_the_rank_stood_frozen() -> None:
    seat = computing()
    seat.plan(Freeze(generation=2))
    committed(seat)
    collect(seat, 2, "g2")
    reached = seat.answer().reached
    assert list(reached) == ["frozen", "collected"]
    assert reached["frozen"] <= reached["collected"]
    collect(seat, 3, "g2")  # somebody died: it still stands where it stood
    assert seat.answer().reached["frozen"] == reached["frozen"]
    running = computing()
    collect(running, 2, "g2")
    assert list(running.answer().reached) == ["collected"]


def test_an_attempt_of_who_gives_its_rank_away_is_no_failure() -> None:
    told = list[Attempt]()
    seat = computing()
    seat.over, seat.role = told.append, Role(rank=1, layout=Layout.parse("dp=3"), generation=1)
    collect(seat, 2, "g2")
    other = Member(rank=1, worker="d", machine="m", addresses=())
    seat.order(decided(2).model_copy(update={"members": (other,)}))
    seat.retire(Retire(reason="its rank was given to another worker"))
    assert [(a.rank, a.gives, a.error) for a in told] == [(1, True, "")]


def test_a_joiner_that_was_prepared_and_heard_no_decision_has_no_attempt_of_the_rank() -> None:
    told = list[Attempt]()
    seat = Seat("d", lambda: None)
    seat.over, seat.role = told.append, Role(rank=1, layout=Layout.parse("dp=3"), generation=2)
    collect(seat, 2, "g2")
    collect(seat, 3, "g2")
    assert [(a.rank, a.gives) for a in told] == [(None, False)]
