"""What an interruption cost, from literal streams."""

from collections.abc import Sequence

import pytest
from tests.unit.incident_streams import (
    CRASH,
    EPOCH,
    GIVEN_UP,
    MOVE,
    MOVE_DROPPED,
    MOVE_OPEN,
    MOVE_SUPERSEDED,
    MOVE_UNDONE,
    OPEN,
    REPLANNED,
    aborted,
    announced,
    completed,
    decided,
    failed,
    fault,
    move,
    planned,
    stream,
    times,
)

from trainmover.cli.incidents import incidents
from trainmover.schemas.base import Event
from trainmover.schemas.events import InterruptionCancelled, JobCompleted, StepAborted
from trainmover.schemas.recorded import Recorded

CUT = StepAborted(
    job="j", run="r1", worker="m-w0", rank=0, generation=1, step=9, cause="link broke"
)


def test_a_drill_is_timed_from_its_fault_to_the_first_committed_step() -> None:
    (incident,) = incidents(CRASH)
    assert incident.t0_from == "fault.injected"
    assert incident.outcome == "completed"
    assert (incident.kind, incident.leavers, incident.joiners) == ("crash", ("m-w1",), ("m-w9",))
    times = (
        incident.detected_s,
        incident.planned_s,
        incident.prepared_s,
        incident.switched_s,
        incident.first_step_s,
    )
    assert times == pytest.approx((0.03, 0.05, 0.15, 0.40, 0.60))


def test_a_crash_that_nobody_injected_is_timed_from_its_first_evidence() -> None:
    (incident,) = incidents(CRASH[1:])
    assert incident.t0_from == "first evidence"
    assert incident.first_step_s == pytest.approx(0.58)


def test_a_fault_of_another_worker_is_not_the_cause() -> None:
    (incident,) = incidents(stream((0.0, fault("m-w0")), (1.0, failed()), (1.1, planned())))
    assert incident.t0_from == "first evidence"


def test_one_normal_step_is_no_downtime_and_the_incident_says_whether_it_was_known() -> None:
    (known,) = incidents(CRASH)
    (raw,) = incidents([*CRASH[:-1], *stream((0.6, completed()))])
    assert known.downtime_s == pytest.approx(0.5)
    assert known.normal_step_s == 0.1
    assert raw.downtime_s == pytest.approx(0.6)
    assert raw.normal_step_s is None


def test_the_last_rank_says_when_all_have_collected_and_pulled() -> None:
    (incident,) = incidents(CRASH)
    assert incident.collected_s == pytest.approx(0.08)
    assert incident.pulled_s == pytest.approx(0.35)


def test_a_clock_that_is_wrong_does_not_change_the_order_that_the_stream_proves() -> None:
    wrong = completed(ranks=[times(0, "m-w0", -50.0, 0.2, 99.0)])
    (incident,) = incidents([*CRASH[:-1], *stream((0.6, wrong))])
    (migration,) = incident.migrations
    (path,) = migration.ranks
    assert path.reached_s["collected"] == pytest.approx(-50)
    assert migration.placed_s(path) == pytest.approx(
        {"collected": 0.05, "obeyed": 0.2, "restored": 0.4}
    )


def test_a_plan_that_replaces_an_aborted_one_belongs_to_the_same_incident() -> None:
    (incident,) = incidents(REPLANNED)
    assert incident.generations == (2, 3)
    assert incident.joiners == ("m-w8",)
    assert incident.outcome == "completed"
    assert incident.prepared_s is None
    given_up, last = incident.migrations
    assert (given_up.aborted_s, given_up.abort_reason) == (2.0, "m-w9 did not answer")
    assert last.completed_s == 2.5


def test_an_interruption_without_an_end_is_open_and_one_given_up_says_why() -> None:
    (open_one,), (given_up,) = incidents(OPEN), incidents(GIVEN_UP)
    assert (open_one.outcome, open_one.downtime_s) == ("open", None)
    assert (given_up.outcome, given_up.reason) == ("aborted", "m-w9 did not answer")


def test_two_deaths_of_one_interruption_are_two_verdicts() -> None:
    both = planned(3, replaced=((0, "m-w0", "m-w8"), (1, "m-w1", "m-w9")))
    records = stream(
        (0.0, failed()), (0.1, planned()), (0.2, failed("m-w0")), (0.3, aborted()), (0.4, both)
    )
    (incident,) = incidents(records)
    assert [failure.workers for failure in incident.failures] == [("m-w1",), ("m-w0",)]
    assert incident.ranks == (0, 1)


def test_a_relink_after_a_cut_starts_at_it_but_not_at_one_that_was_recovered_from() -> None:
    drill = fault("m-w2").model_copy(update={"kind": "cut"})
    relinked = planned(replaced=())
    first = ((0.0, drill), (0.2, CUT), (0.3, relinked), (0.4, decided(target=9)))
    again = planned(replaced=()).model_copy(update={"generation": 3, "incident": "g3"})
    (one,) = incidents(stream(*first))
    assert one.t0_from == "fault.injected"
    assert one.planned_s == pytest.approx(0.3)
    _, two = incidents(stream(*first, (0.9, completed()), (5.0, again)))
    assert two.t0_from == "plan"


def test_a_relink_has_no_leavers_and_starts_at_the_first_aborted_step() -> None:
    relinked = planned(replaced=())
    (incident,) = incidents(stream((0.0, CUT), (0.3, relinked), (0.4, decided(target=9))))
    assert incident.leavers == ()
    assert incident.kind == "relink"
    assert incident.planned_s == pytest.approx(0.3)
    assert incident.lost_steps == 0


def test_steps_done_again_are_counted() -> None:
    (incident,) = incidents(stream((0.0, CUT), (0.3, planned()), (0.4, decided(target=7))))
    assert incident.lost_steps == 2


def test_two_incidents_come_in_the_order_of_their_plans() -> None:
    again = planned(3, replaced=((1, "m-w2", "m-w3"),)).model_copy(update={"incident": "g3"})
    names = [i.incident for i in incidents([*CRASH, Recorded(9, 200.0, again)])]
    assert names == ["g2", "g3"]


# ---- planned


def test_a_move_costs_from_the_first_rank_that_stands_frozen_to_the_next_step() -> None:
    (incident,) = incidents(MOVE)
    assert (incident.kind, incident.outcome, incident.t0_from) == ("planned", "completed", "freeze")
    assert incident.t0 == pytest.approx(EPOCH + 5.2)
    assert incident.downtime_s == pytest.approx(5.6 - 5.2 - 0.1)
    assert incident.first_step_s == pytest.approx(0.4)
    assert (incident.leavers, incident.joiners, incident.ranks) == (("m-w1",), ("m-w9",), (1,))
    assert incident.lost_steps == 0


def test_what_was_done_while_training_went_on_has_durations_and_no_time_of_the_move() -> None:
    (incident,) = incidents(MOVE)
    before = (incident.waited_s, incident.prepare_s, incident.stop_s)
    assert before == pytest.approx((0.1, 5.0, 0.1))
    assert incident.planned_s is None
    (migration,) = incident.migrations
    assert (migration.planned_s, migration.ready, migration.ready_s) == (None, True, None)
    assert (incident.prepared_s, incident.collected_s) == pytest.approx((0.1, 0.12))
    assert (incident.pulled_s, incident.switched_s) == pytest.approx((0.17, 0.2))


@pytest.mark.parametrize(
    "records", [CRASH, REPLANNED, MOVE, MOVE_DROPPED, MOVE_OPEN, MOVE_SUPERSEDED, MOVE_UNDONE]
)
def test_no_duration_is_negative(records: list[Recorded]) -> None:
    for incident in incidents(records):
        for part in (incident, *incident.migrations):
            told = {
                n: s for n, s in part.model_dump().items() if n.endswith("_s") and s is not None
            }
            assert all(seconds >= 0 for seconds in told.values()), told


def test_ranks_that_did_not_say_since_when_they_stood_let_it_begin_with_the_decision() -> None:
    (incident,) = incidents([*MOVE[:-1], *stream((5.6, completed()))])
    assert incident.t0_from == "decision"
    assert incident.downtime_s == pytest.approx(0.3)


@pytest.mark.parametrize(("said", "meant"), [(-900.0, 5.1), (900.0, 5.3)])
def test_a_clock_that_is_wrong_puts_the_freeze_between_what_the_stream_proves(
    said: float, meant: float
) -> None:
    wrong = completed(ranks=[times(0, "m-w0", 5.31, frozen=said)])
    (incident,) = incidents([*MOVE[:-1], *stream((5.6, wrong))])
    assert incident.t0 == pytest.approx(EPOCH + meant)
    (migration,) = incident.migrations
    placed = migration.placed_s(migration.ranks[0])
    assert placed["frozen"] == pytest.approx(0)
    assert placed["collected"] == pytest.approx(max(5.31, meant) - meant)


def test_a_move_that_is_not_decided_costs_nothing() -> None:
    (dropped,), (open_one,) = incidents(MOVE_DROPPED), incidents(MOVE_OPEN)
    for incident in (dropped, open_one):
        assert incident.undecided
        assert (incident.t0_from, incident.planned_s, incident.downtime_s) == ("plan", 0.0, None)
    assert (dropped.outcome, dropped.reason) == ("aborted", "m-w9 ended")
    assert open_one.outcome == "open"


def test_a_move_in_whose_preparation_somebody_dies_is_over_and_the_death_is_another() -> None:
    move, crash = incidents(MOVE_SUPERSEDED)
    assert (move.incident, move.outcome) == ("g2", "aborted")
    assert move.reason == "superseded by generation 3: rank 0 died"
    assert (crash.incident, crash.kind, crash.t0_from) == ("g3", "crash", "first evidence")


def test_a_move_that_the_end_of_the_job_overtakes_is_not_left_open() -> None:
    end = JobCompleted(job="j", run="r1", completed_steps=9, state_digest="d")
    (incident,) = incidents([*MOVE_OPEN, Recorded(4, EPOCH + 6, end)])
    assert (incident.outcome, incident.reason) == ("aborted", "the job ended first")


def test_a_move_whose_joiner_dies_after_the_decision_costs_until_all_go_on_as_before() -> None:
    (incident,) = incidents(MOVE_UNDONE)
    assert (incident.kind, incident.planned) == ("crash", True)
    assert (incident.generations, incident.joiners) == ((2, 3), ())
    assert incident.t0 == pytest.approx(EPOCH + 5.2)
    assert incident.downtime_s == pytest.approx(5.7 - 5.2 - 0.1)
    assert [failure.workers for failure in incident.failures] == [("m-w9",)]


def test_what_was_cancelled_is_no_announcement_of_the_move() -> None:
    first = announced().model_copy(update={"interruption": "move-0"})
    off = InterruptionCancelled(job="j", run="r1", interruption="move-0")
    records = stream((0.0, first), (1.0, off), (7.0, announced()), (7.25, move()))
    (incident,) = incidents(records)
    assert incident.waited_s == pytest.approx(0.25)


def later(records: Sequence[Recorded], *timed: tuple[float, Event]) -> list[Recorded]:
    """`records`, and what came after them."""
    return [
        *records,
        *(Recorded(len(records) + i, EPOCH + s, e) for i, (s, e) in enumerate(timed, start=1)),
    ]


AFTERWARDS = planned(3, ((1, "m-w9", "m-w8"),), num_ranks=3).model_copy(update={"incident": "g3"})


@pytest.mark.parametrize("dies_s", [5.55, 9.0])
def test_a_worker_that_dies_after_its_move_is_told_in_the_incident_of_its_death_alone(
    dies_s: float,
) -> None:
    """Also when it dies just before the move is completed, and its death is planned for after."""
    records = [r for r in MOVE if r.time_s - EPOCH < dies_s]
    died = [(dies_s, failed("m-w9", first_evidence=dies_s))]
    rest = [(r.time_s - EPOCH, r.event) for r in MOVE[len(records) :]]
    moved, died_later = incidents(later(records, *died, *rest, (9.1, AFTERWARDS)))
    assert (moved.kind, moved.failures, moved.detected_s) == ("planned", (), None)
    assert (died_later.kind, died_later.planned) == ("crash", False)
    assert [failure.workers for failure in died_later.failures] == [("m-w9",)]


def test_anybody_who_dies_between_decision_and_first_step_makes_a_crash_of_the_move() -> None:
    records = later(MOVE[:4], (5.35, failed("m-w0", first_evidence=5.33)))
    (incident,) = incidents(records)  # no standby is left, so no plan follows
    assert (incident.kind, incident.planned, incident.outcome) == ("crash", True, "open")
    assert incident.detected_s == pytest.approx(5.35 - 5.3)


def test_a_decision_that_comes_after_the_abort_counts_for_nothing() -> None:
    late = Recorded(9, EPOCH + 9, decided())
    (incident,) = incidents([*MOVE_DROPPED, late])
    assert incident.undecided
    assert incident.migrations[0].decided_s is None
