"""Drains, cancels, preferences, budgets, preemptions: who may have a rank, and who may not."""

from typing import Any

import pytest
from tests.unit.planner_histories import (
    J,
    aborted,
    announced,
    cancelled,
    completed,
    decided,
    failed,
    fold,
    launched,
    member,
    only,
    outputs,
    prepared,
    registered,
    running,
    submitted,
    switched,
    the_failure,
    the_plan,
)

from trainmover.schemas.base import Event
from trainmover.schemas.events import (
    InterruptionCancelled,
    JobStalled,
    JobStarted,
    LayoutAssigned,
    MigrationPlanned,
    WorkerRegistered,
)
from trainmover.services.planner.ending import TERMINATED
from trainmover.services.planner.state import State


def at(worker: str, machine: str, **labels: str) -> WorkerRegistered:
    return registered(worker, 5, machine).model_copy(update={"labels": labels})


def moves(*timed: tuple[float, Event], standbys: str = "d") -> State:
    """Ranks 0 to 2 on a, b, c of machine m0, where d stands by; and e on m1."""
    return running((3.0, at("e", "m1")), *timed, standbys=standbys)


def drained(machine: str, name: str = "drain-1", **more: Any) -> tuple[float, Event]:
    return (9.0, announced(name=name, machine=machine, **more))


def pairs(plan: MigrationPlanned) -> list[tuple[str, str]]:
    return [(r.leaver, r.joiner) for r in plan.replacements]


# ---- a machine


def test_all_ranks_of_a_machine_move_as_one_and_none_to_it() -> None:
    state = moves(drained("m0"), (9.1, at("f", "m1")), (9.2, at("g", "m2")))
    plan = the_plan(outputs(state))
    assert pairs(plan) == [("a", "e"), ("b", "f"), ("c", "g")]
    assert plan.kind == "planned"


def test_a_drained_machine_gets_no_rank_by_a_crash_either_and_the_stall_says_who_is_there() -> None:
    state = moves(drained("m1"), (9.1, failed("b")), standbys="")
    exhausted, stalled = outputs(state)
    assert exhausted.TYPE == "pool.exhausted"
    assert isinstance(stalled, JobStalled)
    assert stalled.unblocked_by.endswith(", or `trainmover undrain m1`")
    back = moves(drained("m1"), (9.1, failed("b")), (9.2, cancelled("drain-1")), standbys="")
    assert pairs(the_plan(outputs(back))) == [("b", "e")]


def test_a_machine_that_is_drained_before_the_start_gets_no_rank() -> None:
    early = fold(
        (0.0, submitted("dp=1", workers_per_machine=1)),
        drained("m0"),
        (1.0, registered("a", 0)),
        (1.1, registered("b", 0, "m1")),
    )
    assigned = only(outputs(early))
    assert isinstance(assigned, LayoutAssigned)
    assert [m.worker for m in assigned.members] == ["b"]


def test_a_worker_that_was_drained_as_a_standby_gets_no_rank() -> None:
    state = moves((9.0, announced("e")), (9.1, failed("b")))
    assert pairs(the_plan(outputs(state))) == [("b", "d")]


# ---- cancelled


def test_what_is_cancelled_before_it_is_planned_is_forgotten_however_late_it_is_repeated() -> None:
    asked = (9.0, announced("b"))
    assert outputs(moves(asked, (9.1, cancelled()))) == ()
    assert outputs(moves(asked, (9.1, cancelled()), asked)) == ()
    assert outputs(moves((8.9, cancelled()), asked)) == ()


def test_a_move_that_is_called_off_is_no_try_and_its_standby_is_free_again() -> None:
    timed: list[tuple[float, Event]] = []
    for n in range(4):
        timed.append((9.0, announced("b", name=f"move-{n}")))
        plan = the_plan(outputs(moves(*timed)))
        gone = (9.2, cancelled(f"move-{n}"))
        timed += [(9.1, plan), gone, (9.3, aborted(plan.generation))]
    state = moves(*timed)
    assert outputs(state) == ()
    assert state.attempts.get("b", 0) == 0
    assert [w.worker for w in state.free] == ["d", "e"]


def test_what_is_decided_goes_on_though_it_is_cancelled() -> None:
    asked = (9.0, announced("b"))
    plan = the_plan(outputs(moves(asked)))
    over = moves(asked, (9.1, plan), (9.2, cancelled()), (9.3, decided(2, 7)))
    assert [m.worker for m in over.latest.members] == ["a", "e", "c"]


def test_who_is_announced_anew_is_tried_anew() -> None:
    timed: list[tuple[float, Event]] = [(9.0, announced("b"))]
    for _ in range(3):
        plan = the_plan(outputs(moves(*timed)))
        timed += [(9.1, plan), (9.2, aborted(plan.generation))]
    assert outputs(moves(*timed)) == ()
    assert the_plan(outputs(moves(*timed, (9.3, announced("b", name="again"))))).generation == 5


def test_two_announcements_of_one_worker_are_one_move_and_one_cancel_leaves_the_other() -> None:
    both = ((9.0, announced("b")), (9.0, announced("b", name="move-2")))
    plan = the_plan(outputs(moves(*both)))
    assert pairs(plan) == [("b", "e")]
    after = moves(*both, (9.1, plan), (9.2, cancelled()), (9.3, aborted(2)))
    assert after.attempts == {"b": 1}
    assert pairs(the_plan(outputs(after))) == [("b", "e")]


# ---- who takes over


def test_the_standby_that_is_named_takes_over_and_others_get_what_is_left() -> None:
    named = (9.0, announced("b", "c", joiners={"c": "e"}))
    assert pairs(the_plan(outputs(moves(named)))) == [("b", "d"), ("c", "e")]


@pytest.mark.parametrize("joiners", [{"b": "x"}, {"b": "a"}, {"b": "e", "c": "e"}])
def test_a_standby_that_is_not_free_is_refused_with_who_is(joiners: dict[str, str]) -> None:
    refusal = only(outputs(moves((9.0, announced("b", "c", joiners=joiners)))))
    assert isinstance(refusal, InterruptionCancelled)
    assert refusal.interruption == "move-1"
    assert refusal.reason == f"{joiners['b']} is no free standby; free: d, e"


def test_the_least_is_shared_with_the_leaver() -> None:
    labels = {"zone": "z1", "rack": "r1", "switch": "s1"}
    leaver = (1.5, at("x", "m5", **labels))
    standbys: dict[str, WorkerRegistered] = {
        "same machine": at("p", "m5", **labels),
        "same switch": at("q", "m6", **labels),
        "same rack": at("r", "m7", **(labels | {"switch": "s2"})),
        "same zone": at("s", "m8", zone="z1", rack="r2", switch="s3"),
        "nothing": at("t", "m9", zone="z2", rack="r3", switch="s4"),
    }
    order = []
    while standbys:
        state = fold(
            (0.0, submitted("dp=1", workers_per_machine=1)),
            leaver,
            (2.0, LayoutAssigned(**J, members=(member(0, "x", "m5"),))),
            (2.5, JobStarted(**J)),
            *((3.0, one) for one in standbys.values()),
            (9.0, announced("x")),
        )
        joiner = the_plan(outputs(state)).replacements[0].joiner
        name = next(name for name, one in standbys.items() if one.worker == joiner)
        order.append(name)
        del standbys[name]
    assert order == ["nothing", "same zone", "same rack", "same switch", "same machine"]


def test_of_equals_the_oldest_takes_over_and_machines_without_labels_share_none() -> None:
    state = moves((3.1, at("f", "m1")), (3.2, at("g", "m2")), (9.0, announced("b")))
    assert pairs(the_plan(outputs(state))) == [("b", "e")]


# ---- budgets


def moved(**limits: Any) -> list[tuple[float, Event]]:
    """Rank 1 has moved from b to e; and d stands by."""
    asked = (9.0, announced("b"))
    job = (0.0, submitted(**limits))
    plan = the_plan(outputs(moves(asked)))
    return [job, asked, (9.1, plan), (9.3, decided(2, 7)), (9.4, switched(2)), (9.5, completed(2))]


def test_planned_interruptions_and_failures_have_budgets_of_their_own() -> None:
    assert outputs(moves(*moved(max_failures=0))) == ()
    more = (9.9, announced("a", name="more"))
    refusal = only(outputs(moves(*moved(max_planned=1), more)))
    assert isinstance(refusal, InterruptionCancelled)
    assert refusal.reason == "1 asked to move, 1 moved already, at most 1 may (--max-planned)"
    crash = moves(*moved(max_planned=1), (9.9, failed("a")))
    assert pairs(the_plan(outputs(crash))) == [("a", "d")]


def test_a_preemption_is_not_refused() -> None:
    more = (9.9, announced("a", name="more", kind="preemption"))
    assert pairs(the_plan(outputs(moves(*moved(max_planned=1), more)))) == [("a", "d")]


# ---- deadlines and preemptions


def test_the_earliest_deadline_is_first_where_standbys_are_few() -> None:
    later = (9.0, announced("b"))
    sooner = (9.1, announced("c", name="sooner", deadline=50.0))
    planned = [e for e in outputs(moves(later, sooner, standbys="")) if e.TYPE[:4] == "migr"]
    assert pairs(the_plan(planned)) == [("c", "e")]


def preempted(*workers: str, name: str = "notice", **more: object) -> Event:
    return announced(*workers, name=name, kind="preemption", deadline=29.0, **more)


def test_a_preemption_does_not_wait_for_a_move_that_is_not_prepared() -> None:
    asked = (9.0, announced("b"))
    plan = the_plan(outputs(moves(asked)))
    both = the_plan(outputs(moves(asked, (9.1, plan), (9.2, preempted("c")))))
    assert (both.generation, both.kind) == (3, "planned")
    assert pairs(both) == [("b", "e"), ("c", "d")]
    few = moves(asked, (9.1, plan), (9.2, preempted("c")), standbys="")
    only_c = [e for e in outputs(few) if isinstance(e, MigrationPlanned)]
    assert pairs(the_plan(only_c)) == [("c", "e")]
    assert outputs(moves(asked, (9.1, plan), (9.2, preempted("b")))) == ()
    nearly = moves(asked, (9.1, plan), (9.2, prepared(2)), (9.3, preempted("c")))
    assert outputs(nearly) == ()
    slower = moves(asked, (9.1, plan), (9.2, announced("c", name="two")))
    assert outputs(slower) == ()


def test_every_machine_that_is_told_to_go_is_the_end_of_the_job() -> None:
    one = moves((9.0, preempted(machine="m1")))
    assert outputs(one) == ()
    all_of_them = moves((9.0, preempted(machine="m1")), (99.0, preempted(name="n2", machine="m0")))
    end = the_failure(outputs(all_of_them))
    assert (end.exit_code, end.reason) == (TERMINATED, "every machine of the job is told to go")


def test_more_ranks_told_to_go_at_once_than_there_are_standbys_are_the_end_of_the_job() -> None:
    together = [(9.0 + n, preempted(worker, name=worker)) for n, worker in enumerate("abc")]
    assert pairs(the_plan(outputs(moves(*together[:2])))) == [("a", "e"), ("b", "d")]
    end = the_failure(outputs(moves(*together)))
    assert end.reason == "3 ranks are told to go at once, and 2 standbys are left"
    assert end.exit_code == TERMINATED
    apart = (99.0, preempted("c", name="c"))
    assert outputs(moves(*together[:2], apart))[0].TYPE == "pool.exhausted"


def test_standbys_that_go_themselves_do_not_count_and_those_that_start_do() -> None:
    alone = moves((9.0, preempted("b")), standbys="")
    assert pairs(the_plan(outputs(alone))) == [("b", "e")]
    with_its_standby = ((8.9, preempted("e", name="e")), (9.0, preempted("b")))
    end = the_failure(outputs(moves(*with_its_standby, standbys="")))
    assert end.reason == "1 rank is told to go at once, and no standbys are left"
    coming = (8.0, launched("f", 3, "m1"))
    assert outputs(moves(coming, *with_its_standby, standbys=""))[0].TYPE == "pool.exhausted"


def test_a_standby_that_dies_later_makes_no_end_of_it() -> None:
    state = moves((9.0, preempted("b")), (9.5, failed("e", machine="m1")), standbys="")
    assert outputs(state)[0].TYPE == "pool.exhausted"
