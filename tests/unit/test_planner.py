"""Generation 1, and who replaces whom: literal events in, literal plans out."""

from tests.unit.planner_histories import (
    ASSIGNED,
    B_TO_D,
    GROUND,
    A,
    B,
    C,
    J,
    aborted,
    completed,
    decided,
    failed,
    fold,
    launched,
    member,
    outputs,
    plan,
    ready,
    registered,
    running,
    submitted,
    the_failure,
    the_plan,
)

from trainmover.schemas.events import (
    Exit,
    JobFailed,
    JobStarted,
    LayoutAssigned,
    Replacement,
    StandbyWarmed,
    WorkerExited,
)
from trainmover.schemas.recorded import Recorded
from trainmover.services.planner.choice import OTHER_MACHINES_S, STABLE_S
from trainmover.services.planner.decide import IMPORTS_S
from trainmover.services.planner.state import evolve

# ---- generation 1


def test_nothing_is_said_before_the_job_is_submitted() -> None:
    assert outputs(fold((1.0, registered("a", 0)))) == ()


def test_ranks_are_given_by_machine_and_local_index_when_enough_workers_registered() -> None:
    two = submitted("dp=4", workers_per_machine=2)
    came = [registered("d", 1, "m1"), registered("b", 1), registered("c", 0, "m1")]
    state = fold((0.0, two), *((1.0, event) for event in came))
    assert outputs(state, 1.0) == ()
    state = evolve(state, Recorded(seq=5, time_s=1.1, event=registered("a", 0)))
    members = (member(0, "a"), member(1, "b"), member(2, "c", "m1"), member(3, "d", "m1"))
    assert outputs(state, 1.1) == (LayoutAssigned(**J, members=members),)


def test_a_surplus_worker_gets_no_rank_while_a_better_one_is_on_its_way() -> None:
    launches = [(0.5, launched(w, i)) for i, w in enumerate("abcd")]
    came = [(1.0, registered("d", 3)), (1.0, registered("a", 0)), (1.2, registered("b", 1))]
    state = fold((0.0, submitted()), *launches, *came)
    assert outputs(state, 2.1) == ()
    by_then = evolve(state, Recorded(seq=9, time_s=2.1, event=registered("c", 2)))
    assert outputs(by_then, 2.1) == (ASSIGNED,)


def test_a_surplus_worker_gets_a_rank_when_the_better_one_does_not_come() -> None:
    launches = [(0.5, launched(w, i)) for i, w in enumerate("abcd")]
    came = [(1.0, registered("d", 3)), (1.0, registered("a", 0)), (1.2, registered("b", 1))]
    state = fold((0.0, submitted()), *launches, *came)
    with_d = LayoutAssigned(**J, members=(A, B, member(2, "d")))
    assert outputs(state, 1.1 + STABLE_S) == ()
    assert outputs(state, 1.2 + STABLE_S) == (with_d,)
    died = evolve(state, Recorded(seq=9, time_s=1.3, event=failed("c")))
    assert outputs(died, 1.3) == (with_d,)


def test_a_machine_that_has_just_come_is_awaited_from_its_first_sign_on() -> None:
    two = submitted("dp=2", workers_per_machine=1)
    came = [(1.0, registered("a", 0)), (1.0, registered("b", 1))]
    late = 1.0 + 2 * STABLE_S
    standby_first = fold((0.0, two), *came, (late, launched("d", 1, "m1")))
    assert outputs(standby_first, late) == ()
    starting = fold((0.0, two), *came, (late, launched("c", 0, "m1")))
    assert outputs(starting, late + STABLE_S - 0.1) == ()
    on_one = LayoutAssigned(**J, members=(member(0, "a"), member(1, "b")))
    assert outputs(starting, late + STABLE_S) == (on_one,)


def test_ranks_wait_for_a_machine_that_has_not_come_before_standbys_elsewhere_get_them() -> None:
    two = submitted("dp=2", workers_per_machine=1)
    came = [(1.0, registered("a", 0)), (1.0, registered("b", 1))]
    state = fold((0.0, two), *came)
    assert outputs(state, 2.0 + STABLE_S) == ()
    on_two = evolve(state, Recorded(seq=9, time_s=60.0, event=registered("c", 0, "m1")))
    members = (member(0, "a"), member(1, "c", "m1"))
    assert outputs(on_two, 60.0) == (LayoutAssigned(**J, members=members),)
    on_one = LayoutAssigned(**J, members=(member(0, "a"), member(1, "b")))
    assert outputs(state, 1.0 + OTHER_MACHINES_S) == (on_one,)


def test_a_worker_that_died_before_the_start_gets_no_rank() -> None:
    came = [(1.0, registered(w, i)) for i, w in enumerate("abcd")]
    state = fold((0.0, submitted()), *came, (1.1, failed("a")))
    members = (member(0, "b"), member(1, "c"), member(2, "d"))
    assert outputs(state) == (LayoutAssigned(**J, members=members),)


def test_a_job_whose_workers_never_come_is_given_up_after_the_stall_timeout() -> None:
    came = ((9.0, launched("a", 0)), (9.0, launched("b", 1)), (10.0, registered("a", 0)))
    state = fold((0.0, submitted(stall_timeout_s=60)), *came)
    assert outputs(state, 69.0) == ()
    failure = the_failure(outputs(state, 69.1))
    assert failure.exit_code == 3
    assert failure.reason == "1 of 3 workers have registered within 60 s (--stall-timeout)"


def test_a_job_whose_agents_still_import_is_not_stalled() -> None:
    state = fold((0.0, submitted(stall_timeout_s=60)))
    assert outputs(state, IMPORTS_S) == ()
    assert the_failure(outputs(state, IMPORTS_S + 0.1)).exit_code == 3


def test_the_job_is_started_once_when_every_member_is_set_up() -> None:
    base = GROUND[:-1]
    state = fold(*base, (2.0, ready("a", 0)), (2.0, ready("b", 1)))
    assert outputs(state) == ()
    state = evolve(state, Recorded(seq=9, time_s=2.0, event=ready("c", 2)))
    assert outputs(state) == (JobStarted(**J),)
    assert outputs(evolve(state, Recorded(seq=10, time_s=2.0, event=JobStarted(**J)))) == ()


def test_a_set_up_that_was_begun_again_counts_from_there() -> None:
    again = (
        *((2.0, ready(worker, rank)) for rank, worker in enumerate("ac")),
        (3.0, registered("d", 3)),
        (3.0, failed("b")),
        (3.0, B_TO_D),
        (3.0, decided(2, 0, setup_again=True)),
        (4.0, ready("d", 1, 2)),
    )
    state = fold(*GROUND[:-1], *again)
    assert outputs(state) == ()
    more = (*again, (4.0, ready("a", 0, 2)), (4.0, ready("c", 2, 2)))
    assert outputs(fold(*GROUND[:-1], *more)) == (JobStarted(**J),)


# ---- a crash


def test_a_failed_member_is_replaced_by_a_standby() -> None:
    assert outputs(running((9.0, failed("b")), standbys="d")) == (B_TO_D,)


def test_a_plan_is_made_once() -> None:
    state = running((9.0, failed("b")), (9.1, B_TO_D), (9.2, B_TO_D), standbys="d")
    assert outputs(state) == ()
    assert len(state.assignments) == 2


def test_a_failed_standby_only_leaves_the_pool() -> None:
    assert outputs(running((9.0, failed("d")), standbys="d")) == ()
    state = running((9.0, failed("d")), (9.1, failed("b")), standbys="de")
    assert the_plan(outputs(state)).replacements[0].joiner == "e"


def test_a_standby_that_exited_is_not_chosen_though_no_verdict_came_yet() -> None:
    gone = WorkerExited(**J, machine="m0", exits=(Exit(worker="d", code=-9),))
    state = running((9.0, gone), (9.1, failed("b")), standbys="de")
    assert the_plan(outputs(state)).replacements[0].joiner == "e"


def test_a_warm_standby_comes_before_an_older_one() -> None:
    warm = StandbyWarmed(**J, worker="e", rank=1, warm_s=1.0)
    state = running((8.0, warm), (9.0, failed("b")), standbys="de")
    assert the_plan(outputs(state)).replacements[0].joiner == "e"


def test_a_standby_on_another_machine_is_preferred() -> None:
    elsewhere = registered("e", 0, "m1")
    state = running((8.0, elsewhere), (9.0, failed("b")), standbys="d")
    assert the_plan(outputs(state)).replacements[0].joiner == "e"
    warm = (8.1, StandbyWarmed(**J, worker="d", rank=0, warm_s=1.0))
    state = running((8.0, elsewhere), warm, (9.0, failed("b")), standbys="d")
    assert the_plan(outputs(state)).replacements[0].joiner == "d"


def test_a_machine_takes_all_its_ranks_into_one_plan() -> None:
    state = running((9.0, failed("a", "c")), standbys="de")
    planned = the_plan(outputs(state))
    assert planned.members == (member(0, "d"), B, member(2, "e"))
    assert [(r.rank, r.leaver, r.joiner) for r in planned.replacements] == [
        (0, "a", "d"),
        (2, "c", "e"),
    ]


def test_a_second_failure_during_a_migration_leads_to_a_new_plan_of_the_same_incident() -> None:
    state = running((9.0, failed("b")), (9.1, B_TO_D), (9.2, failed("c")), standbys="de")
    assert outputs(state) == (
        plan(
            3,
            (1, "b", "d"),
            (2, "c", "e"),
            members=(A, member(1, "d"), member(2, "e")),
            reason="rank 2 lost its worker c (crash: killed by SIGKILL), e takes over",
        ),
    )


def test_a_joiner_that_fails_is_replaced_and_its_rank_stands_once_in_the_plan() -> None:
    state = running((9.0, failed("b")), (9.1, B_TO_D), (9.2, failed("d")), standbys="de")
    planned = the_plan(outputs(state))
    assert planned.replacements == (Replacement(rank=1, leaver="d", joiner="e"),)
    assert planned.incident == "g2"


def test_a_failure_after_the_migration_is_a_new_incident() -> None:
    state = running(
        (9.0, failed("b")),
        (9.1, B_TO_D),
        (9.2, completed(2)),
        (9.3, failed("c")),
        standbys="de",
    )
    planned = the_plan(outputs(state))
    assert (planned.generation, planned.incident) == (3, "g3")
    assert planned.replacements == (Replacement(rank=2, leaver="c", joiner="e"),)


def test_the_completion_of_an_older_generation_does_not_close_the_incident() -> None:
    to_e = plan(3, (1, "d", "e"), members=(A, member(1, "e"), C), reason="")
    state = running(
        (9.0, failed("b")),
        (9.1, B_TO_D),
        (9.2, failed("d")),
        (9.3, to_e),
        (9.4, completed(2)),
        (9.5, failed("c")),
        standbys="def",
    )
    assert the_plan(outputs(state)).incident == "g2"


# ---- a migration that was aborted


def test_missing_members_of_an_aborted_migration_are_leavers_of_the_next_plan() -> None:
    state = running((9.0, failed("b")), (9.1, B_TO_D), (9.2, aborted(2, "c")), standbys="de")
    planned = the_plan(outputs(state))
    assert planned.members == (A, member(1, "d"), member(2, "e"))
    assert planned.reason == "rank 2 lost its worker c (it did not do its part), e takes over"


def test_without_missing_members_the_same_plan_is_made_again() -> None:
    state = running((9.0, failed("b")), (9.1, B_TO_D), (9.2, aborted(2)), standbys="de")
    assert outputs(state) == (
        plan(3, (1, "b", "d"), members=B_TO_D.members, reason="generation 2: too late"),
    )


def test_the_abort_of_an_older_generation_changes_nothing() -> None:
    again = plan(3, (1, "b", "d"), members=B_TO_D.members, reason="")
    state = running(
        (9.0, failed("b")), (9.1, B_TO_D), (9.2, again), (9.3, aborted(2, "c")), standbys="de"
    )
    assert outputs(state) == ()


def test_the_third_abort_with_the_same_members_fails_the_job() -> None:
    again = [plan(g, (1, "b", "d"), members=B_TO_D.members, reason="") for g in (3, 4)]
    history = [(9.1, B_TO_D), (9.2, aborted(2)), (9.3, again[0]), (9.4, aborted(3))]
    state = running((9.0, failed("b")), *history, standbys="d")
    assert the_plan(outputs(state)).generation == 4
    state = running((9.0, failed("b")), *history, (9.5, again[1]), (9.6, aborted(4)), standbys="d")
    failure = the_failure(outputs(state))
    assert failure.exit_code == 5
    assert failure.reason == (
        "3 plans with the same workers failed in a row; the last one: generation 4: too late"
    )


def test_lost_state_fails_the_job_with_the_reason() -> None:
    lost = aborted(2, state_lost=True)
    state = running((9.0, failed("b")), (9.1, B_TO_D), (9.2, lost), standbys="d")
    assert outputs(state) == (JobFailed(**J, reason="too late", exit_code=4),)
