"""How a job ends: literal events in, the end out."""

from collections.abc import Sequence
from hashlib import sha256

import pytest
from tests.unit.planner_histories import (
    B_TO_D,
    GROUND,
    A,
    B,
    C,
    J,
    completed,
    decided,
    error,
    failed,
    finished,
    fold,
    launched,
    member,
    only,
    outputs,
    plan,
    registered,
    running,
    submitted,
    switched,
    the_failure,
    the_plan,
)

from trainmover.schemas.base import Event
from trainmover.schemas.events import (
    JobCompleted,
    JobFailed,
    MigrationPlanned,
    RankReady,
    UserError,
)
from trainmover.services.planner.state import State

# ---- user code, limits


def test_an_error_before_the_first_commit_fails_the_job_with_the_traceback() -> None:
    crash = failed("b", errors=(error(1, step=0, committed=0),))
    failure = the_failure(outputs(running((9.0, crash), standbys="d")))
    assert failure.exit_code == 1
    assert failure.reason == (
        "rank 1 raised E in step 0, before the first committed step: no\nthe traceback"
    )


def test_an_error_before_there_are_ranks_fails_the_job() -> None:
    crash = failed("a", errors=(error(None, step=0, committed=0),))
    failure = the_failure(outputs(fold((0.0, submitted()), (1.0, crash))))
    assert failure.exit_code == 1


def test_an_error_of_a_standby_in_shadow_does_not_touch_the_job() -> None:
    crash = failed("d", errors=(error(1, step=0, committed=0),))
    assert outputs(running((9.0, crash), standbys="d")) == ()


def test_an_error_of_one_rank_in_a_later_step_is_a_crash() -> None:
    state = running((9.0, failed("b", errors=(error(1),))), standbys="d")
    assert outputs(state) == (B_TO_D,)


def test_the_same_error_in_the_same_step_on_most_ranks_fails_the_job() -> None:
    first = (9.0, failed("b", errors=(error(1),)))
    failure = the_failure(outputs(running(first, (9.1, failed("c", errors=(error(2),))))))
    assert failure.exit_code == 1
    assert "like 2 of 3 ranks" in failure.reason
    other = (9.1, failed("c", errors=(error(2, exception="F"),)))
    assert the_plan(outputs(running(first, other, standbys="de"))).generation == 2


def test_the_same_error_on_the_successor_fails_the_job() -> None:
    first = (9.0, failed("b", errors=(error(1),)))
    history = (first, (9.1, B_TO_D), (9.2, decided(2, 7)), (9.3, completed(2)))
    state = running(*history, (9.4, failed("d", errors=(error(1, committed=0),))), standbys="de")
    failure = the_failure(outputs(state))
    assert failure.exit_code == 1
    assert "again on a fresh worker" in failure.reason
    later = (9.4, failed("d", errors=(error(1, step=8),)))
    assert the_plan(outputs(running(*history, later, standbys="de"))).generation == 3


def test_a_verdict_that_is_told_twice_is_no_second_error() -> None:
    crash = failed("b", errors=(error(1),))
    assert outputs(running((9.0, crash), (9.1, crash), standbys="d")) == (B_TO_D,)


def test_a_huge_error_text_still_fits_the_event() -> None:
    big = UserError(
        exception="E" * 20_000,
        message="m" * 16_000,
        traceback="t" * 16_000,
        rank=1,
        step=0,
        committed=0,
    )
    assert the_failure(outputs(running((9.0, failed("b", errors=(big,)))))).exit_code == 1


def test_a_script_that_ends_before_anybody_registers_fails_the_job() -> None:
    def state(*dead: str) -> State:
        came = ((1.0, launched(worker, index)) for index, worker in enumerate("abcd"))
        return fold((0.0, submitted()), *came, (2.0, failed(*dead)))

    assert outputs(state("a", "b"), 9.0) == ()
    failure = the_failure(outputs(state("a", "b", "d"), 9.0))
    assert failure.exit_code == 1
    assert failure.reason.startswith(
        "3 of 4 workers ended before they registered (killed by SIGKILL): their output says why."
    )


def test_workers_that_end_before_they_register_fail_a_job_that_others_wait_for() -> None:
    def state(*dead: str) -> State:
        came = [(1.0, launched(worker, index)) for index, worker in enumerate("abcdef")]
        return fold((0.0, submitted()), *came, (1.0, registered("a", 0)), (2.0, failed(*dead)))

    assert outputs(state(*"bcde"), 9.0) == ()
    assert the_failure(outputs(state(*"bcdef"), 9.0)).exit_code == 1


def test_the_loss_of_every_replica_fails_the_job_though_no_standby_is_free() -> None:
    assert the_failure(outputs(running((9.0, failed("a", "b", "c"))))).reason == (
        "ranks 0, 1, 2 held every copy of the state (whole model) and failed: killed by SIGKILL; "
        "no holder of this shard is left; in-memory snapshots are not in this version"
    )
    pipeline = ((0.0, submitted("pp=3")), *GROUND[1:], (9.0, failed("b")))
    failure = the_failure(outputs(fold(*pipeline)))
    assert failure.exit_code == 4
    assert failure.reason.startswith("rank 1 held every copy of the state (pp=1)")


def test_the_objects_that_only_one_rank_held_are_named_when_it_fails() -> None:
    keys = [{"model": "", "zero": f"dp={rank}"} for rank in range(3)]
    said = [
        (4.0, RankReady(**J, worker=worker, rank=rank, generation=1, shards=keys[rank]))
        for rank, worker in enumerate("abc")
    ]
    failure = the_failure(outputs(running(*said, (9.0, failed("b")), standbys="d")))
    assert failure.exit_code == 4
    assert failure.reason == (
        "rank 1 held every copy of the state (dp=1: zero) and failed: killed by SIGKILL; "
        "no holder of this shard is left; in-memory snapshots are not in this version"
    )


def test_joiners_that_fail_one_after_the_other_fail_the_job() -> None:
    def state(joiners: str) -> State:
        events: list[tuple[float, Event]] = [(9.0, failed("b"))]
        for generation, joiner in enumerate(joiners, 2):
            members = (A, member(1, joiner), C)
            events.append((9.0, plan(generation, (1, "b", joiner), members=members, reason="r")))
            events += [(9.0, switched(generation)), (9.0, failed(joiner))]
        return running(*events, standbys="defgh")

    assert isinstance(only(outputs(state("de"))), MigrationPlanned)
    failure = the_failure(outputs(state("def")))
    assert failure.exit_code == 5
    assert failure.reason == (
        "3 workers in a row took over rank 1 and failed before a step was committed"
        " (--max-incidents)"
    )


def test_more_failures_than_allowed_fail_the_job() -> None:
    def state(max_failures: int) -> State:
        job = (0.0, submitted(max_failures=max_failures))
        came = ((3.0, registered("d", 3)), (3.0, registered("e", 4)))
        return fold(job, *GROUND[1:], *came, (9.0, failed("b")), (9.1, failed("d")))

    assert the_plan(outputs(state(1))).generation == 2
    failure = the_failure(outputs(state(0)))
    assert failure.exit_code == 5
    assert failure.reason.startswith("1 workers that held a rank failed, at most 0 may")


def test_incidents_that_all_leave_the_job_where_it_was_fail_it() -> None:
    def history(targets: Sequence[int]) -> list[tuple[float, Event]]:
        events: list[tuple[float, Event]] = []
        for generation, target in enumerate(targets, 2):
            incident = f"g{generation}"
            relink = plan(generation, members=(A, B, C), reason="", incident=incident)
            events.append((9.0, relink))
            events.append((9.0, decided(generation, target, incident)))
            events.append((9.0, switched(generation)))
            events.append((9.0, completed(generation, incident, target)))
        return events

    assert outputs(running(*history([7, 7, 8]))) == ()
    assert the_failure(outputs(running(*history([7, 7, 7])))).exit_code == 5


# ---- the end


def test_the_job_is_completed_when_every_member_has_finished() -> None:
    some = ((9.0, finished("a", 0)), (9.0, finished("b", 1)))
    assert outputs(running(*some)) == ()
    done = JobCompleted(**J, completed_steps=10, state_digest=sha256(b"d0\nd1\nd2").hexdigest())
    assert outputs(running(*some, (9.1, finished("c", 2)))) == (done,)
    assert outputs(running(*some, (9.1, finished("c", 2)), (9.2, done), (9.3, failed("a")))) == ()


def test_a_finished_worker_that_fails_is_replaced_while_others_run() -> None:
    state = running((9.0, finished("b", 1)), (9.1, failed("b")), standbys="d")
    assert outputs(state) == (B_TO_D,)


def test_a_finished_worker_that_fails_after_all_have_finished_changes_nothing() -> None:
    ends = ((9.0, finished(w, r)) for r, w in enumerate("abc"))
    assert isinstance(only(outputs(running(*ends, (9.1, failed("b"))))), JobCompleted)


def test_a_plan_that_was_made_before_the_others_said_they_had_finished_does_no_harm() -> None:
    state = running(
        (9.0, finished("b", 1)),
        (9.1, failed("b")),
        (9.2, B_TO_D),
        (9.3, finished("a", 0)),
        (9.3, finished("c", 2)),
        standbys="d",
    )
    assert isinstance(only(outputs(state)), JobCompleted)


def test_a_finish_counts_in_later_generations_of_the_same_worker() -> None:
    history = ((9.0, finished("a", 0)), (9.1, failed("b")), (9.2, B_TO_D), (9.3, completed(2)))
    ends = ((9.4, finished("d", 1, 2)), (9.4, finished("c", 2, 2)))
    assert isinstance(only(outputs(running(*history, *ends, standbys="d"))), JobCompleted)


def test_ranks_that_finished_at_different_steps_fail_the_job() -> None:
    ends = [finished("a", 0), finished("b", 1), finished("c", 2, committed=9)]
    failure = the_failure(outputs(running(*((9.0, event) for event in ends))))
    assert "[9, 10]" in failure.reason


@pytest.mark.parametrize(
    "end",
    [JobCompleted(**J, completed_steps=1, state_digest=""), JobFailed(**J, reason="", exit_code=1)],
)
def test_nothing_is_said_after_the_end(end: Event) -> None:
    assert outputs(running((9.0, end), (9.1, failed("b")), standbys="d")) == ()
