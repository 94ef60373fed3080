"""What an interruption cost, from literal streams."""

import pytest

from trainmover.cli.incidents import incidents, timeline
from trainmover.schemas.base import Event
from trainmover.schemas.events import (
    FaultInjected,
    MigrationAborted,
    MigrationCompleted,
    MigrationDecided,
    MigrationPlanned,
    MigrationSwitched,
    Replacement,
    StepAborted,
    WorkerFailed,
)
from trainmover.schemas.recorded import Recorded

JOB = {"job": "j", "run": "r1"}


def stream(*timed: tuple[float, Event]) -> list[Recorded]:
    return [Recorded(seq, 100.0 + at, event) for seq, (at, event) in enumerate(timed, start=1)]


def fault(worker: str = "m-w1") -> FaultInjected:
    return FaultInjected(**JOB, kind="kill", worker=worker, rank=1, step=7)


def failed(worker: str = "m-w1", first_evidence: float = 100.02) -> WorkerFailed:
    return WorkerFailed(
        **JOB,
        workers=(worker,),
        kind="crash",
        machine="m",
        evidence="killed by SIGKILL",
        reason="its agent saw it exit",
        first_evidence=first_evidence,
    )


def planned(
    generation: int = 2, leaver: str = "m-w1", joiner: str = "m-w2", incident: str = "g2"
) -> MigrationPlanned:
    return MigrationPlanned(
        **JOB,
        generation=generation,
        incident=incident,
        kind="crash",
        replacements=(Replacement(rank=1, leaver=leaver, joiner=joiner),),
        members=(),
        reason="rank 1 lost its worker",
    )


def relinked(generation: int = 2) -> MigrationPlanned:
    return planned(generation).model_copy(update={"replacements": (), "kind": "relink"})


def decided(generation: int = 2, target: int = 7) -> MigrationDecided:
    return MigrationDecided(**JOB, generation=generation, incident="g2", target=target)


def switched(generation: int = 2) -> MigrationSwitched:
    return MigrationSwitched(**JOB, generation=generation, incident="g2", target=7)


def completed(generation: int = 2) -> MigrationCompleted:
    return MigrationCompleted(**JOB, generation=generation, incident="g2", committed=8)


def aborted(generation: int = 2) -> MigrationAborted:
    return MigrationAborted(
        **JOB, generation=generation, incident="g2", reason="m-w2 did not answer"
    )


CRASH = stream(
    (0.00, fault()),
    (0.03, failed()),
    (0.05, planned()),
    (0.15, decided()),
    (0.40, switched()),
    (0.60, completed()),
)


def test_a_drill_is_timed_from_its_fault_to_the_first_committed_step() -> None:
    (incident,) = incidents(CRASH)
    assert incident.t0_from == "fault.injected"
    assert incident.outcome == "completed"
    assert (incident.kind, incident.leavers, incident.joiners) == ("crash", ("m-w1",), ("m-w2",))
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
    (known,) = incidents(CRASH, {"g2": 0.1})
    (raw,) = incidents(CRASH)
    assert known.downtime_s == pytest.approx(0.5)
    assert known.normal_step_s == 0.1
    assert raw.downtime_s == pytest.approx(0.6)
    assert raw.normal_step_s is None


def test_a_plan_that_replaces_an_aborted_one_belongs_to_the_same_incident() -> None:
    records = stream(
        (0.0, failed()),
        (0.1, planned()),
        (2.0, aborted()),
        (2.1, planned(3, leaver="m-w1", joiner="m-w3")),
        (2.5, completed(3)),
    )
    (incident,) = incidents(records)
    assert incident.generations == (2, 3)
    assert incident.joiners == ("m-w3",)
    assert incident.outcome == "completed"
    assert incident.prepared_s is None


def test_an_interruption_without_an_end_is_open_and_one_given_up_says_why() -> None:
    (open_one,) = incidents(stream((0.0, failed()), (0.1, planned())))
    (given_up,) = incidents(stream((0.0, failed()), (0.1, planned()), (2.0, aborted())))
    assert (open_one.outcome, open_one.downtime_s) == ("open", None)
    assert (given_up.outcome, given_up.reason) == ("aborted", "m-w2 did not answer")


def test_a_relink_has_no_leavers_and_starts_at_the_first_aborted_step() -> None:
    cut = StepAborted(**JOB, worker="m-w0", rank=0, generation=1, step=9, cause="link broke")
    (incident,) = incidents(stream((0.0, cut), (0.3, relinked()), (0.4, decided(target=9))))
    assert incident.leavers == ()
    assert incident.planned_s == pytest.approx(0.3)
    assert incident.lost_steps == 0


def test_steps_done_again_are_counted() -> None:
    cut = StepAborted(**JOB, worker="m-w0", rank=0, generation=1, step=9, cause="link broke")
    (incident,) = incidents(stream((0.0, cut), (0.3, planned()), (0.4, decided(target=7))))
    assert incident.lost_steps == 2


def test_two_incidents_come_in_the_order_of_their_plans() -> None:
    again = planned(3, leaver="m-w2", joiner="m-w3", incident="g3")
    names = [i.incident for i in incidents([*CRASH, Recorded(9, 200.0, again)])]
    assert names == ["g2", "g3"]


def test_a_timeline_names_every_phase_with_its_milliseconds() -> None:
    text = timeline(incidents(CRASH, {"g2": 0.1})[0])
    for word in ("rank 1: m-w1 -> m-w2", "detected", "600 ms", "downtime 500 ms", "lost steps: 0"):
        assert word in text
