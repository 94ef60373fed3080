"""What an interruption cost, from literal streams."""

import pytest
from tests.unit.incident_streams import (
    CRASH,
    GIVEN_UP,
    OPEN,
    REPLANNED,
    aborted,
    completed,
    decided,
    failed,
    fault,
    planned,
    stream,
    times,
)

from trainmover.cli.incidents import incidents
from trainmover.schemas.events import StepAborted
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
