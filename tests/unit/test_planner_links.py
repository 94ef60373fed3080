"""Broken links with nobody dead, and too few standbys: literal events in, literal plans out."""

from tests.unit.planner_histories import (
    B_TO_D,
    A,
    B,
    C,
    J,
    aborted,
    completed,
    failed,
    member,
    outputs,
    peer_lost,
    plan,
    registered,
    running,
    step_aborted,
    switched,
    the_failure,
    the_plan,
)

from trainmover.schemas.base import Event
from trainmover.schemas.events import (
    JobFailed,
    JobStalled,
    PoolExhausted,
    PoolReplenished,
    Replacement,
)
from trainmover.services.planner.decide import UNBLOCKED_BY

# ---- a broken link


def test_an_aborted_step_with_nobody_dead_is_a_relink_after_the_settle_time() -> None:
    state = running((9.0, step_aborted("a")), (9.2, step_aborted("b")))
    assert outputs(state, 9.29) == ()
    assert outputs(state, 9.31) == (
        plan(
            2,
            members=(A, B, C),
            reason="a aborted step 7 and nobody is known to be dead",
        ),
    )


def test_a_lost_link_is_enough_since_ranks_that_hold_abort_no_step() -> None:
    state = running((9.0, peer_lost("a", "b")), standbys="d")
    planned = the_plan(outputs(state, 9.31))
    assert (planned.kind, planned.members) == ("relink", (A, B, C))


def test_a_failure_within_the_settle_time_is_a_crash_and_no_relink() -> None:
    state = running((9.0, step_aborted("a")), (9.1, failed("b")), standbys="d")
    assert outputs(state, 9.4) == (B_TO_D,)


def test_a_sign_of_an_older_generation_is_no_reason_for_a_relink() -> None:
    state = running(
        (9.0, failed("b")),
        (9.1, B_TO_D),
        (9.2, step_aborted("a", 1)),
        (9.3, switched(2)),
        (9.4, completed(2)),
        standbys="d",
    )
    assert outputs(state) == ()


def test_a_link_that_was_lost_on_the_way_to_the_switch_is_no_reason_for_a_relink() -> None:
    way = ((9.0, failed("b")), (9.1, B_TO_D), (9.2, peer_lost("a", "d", 2)))
    assert outputs(running(*way, standbys="d")) == ()
    assert outputs(running(*way, (9.3, switched(2)), standbys="d")) == ()
    after = (*way, (9.3, switched(2)), (9.4, peer_lost("a", "d", 2)))
    planned = the_plan(outputs(running(*after, standbys="d")))
    assert planned.replacements == (Replacement(rank=1, leaver="b", joiner="d"),)
    assert planned.incident == "g2"


def test_a_member_that_two_peers_lost_is_replaced() -> None:
    signs = [peer_lost("a", "b"), peer_lost("c", "b"), peer_lost("b", "a")]
    state = running(*((9.0, sign) for sign in signs), standbys="d")
    assert outputs(state, 9.31) == (
        plan(
            2,
            (1, "b", "d"),
            members=B_TO_D.members,
            reason="2 peers lost their links to b: d takes over",
        ),
    )


def test_a_member_that_two_peers_lost_is_linked_again_when_no_standby_is_free() -> None:
    signs = [peer_lost("a", "b"), peer_lost("c", "b")]
    planned = the_plan(outputs(running(*((9.0, sign) for sign in signs)), 9.31))
    assert planned.kind == "relink"


RELINK = plan(2, members=(A, B, C), reason="")


def test_the_same_link_broken_again_within_the_window_costs_one_end_its_rank() -> None:
    first = ((9.0, peer_lost("a", "b")), (9.4, RELINK), (9.5, switched(2)), (9.6, completed(2)))
    soon = running(*first, (60.0, peer_lost("b", "a", 2)), standbys="d")
    planned = the_plan(outputs(soon, 60.4))
    assert planned.replacements == (Replacement(rank=0, leaver="a", joiner="d"),)
    assert planned.reason == "a link of a broke again within 60 s: d takes over"
    late = running(*first, (80.0, peer_lost("b", "a", 2)), standbys="d")
    assert the_plan(outputs(late, 80.4)).kind == "relink"
    other = running(*first, (60.0, peer_lost("b", "c", 2)), standbys="d")
    assert the_plan(outputs(other, 60.4)).kind == "relink"


def test_a_link_that_broke_when_another_worker_died_is_not_held_against_its_ends() -> None:
    state = running(
        (9.0, peer_lost("a", "c")),
        (9.0, failed("b")),
        (9.1, B_TO_D),
        (9.2, switched(2)),
        (9.3, completed(2)),
        (20.0, peer_lost("a", "c", 2)),
        standbys="de",
    )
    assert the_plan(outputs(state, 20.4)).kind == "relink"


def test_a_committed_step_allows_as_many_relinks_as_before() -> None:
    history: list[tuple[float, Event]] = []
    for generation in (2, 3, 4):
        relink = plan(generation, members=(A, B, C), reason="", incident=f"g{generation}")
        history.append((9.0 + generation, relink))
        history.append((9.6 + generation, completed(generation, committed=generation)))
    state = running(*history, (20.0, step_aborted("a", 4)))
    assert the_plan(outputs(state)).incident == "g5"


def test_links_that_break_again_before_any_step_is_committed_fail_the_job() -> None:
    history: list[tuple[float, Event]] = []
    for generation in (2, 3, 4):
        history.append((9.0 + generation, step_aborted("a", generation - 1)))
        history.append((9.5 + generation, plan(generation, members=(A, B, C), reason="")))
        history.append((9.6 + generation, switched(generation)))
    assert outputs(running(*history)) == ()
    failure = the_failure(outputs(running(*history, (20.0, step_aborted("a", 4)))))
    assert failure.exit_code == 5


# ---- too few standbys

NONE_FREE = "rank 1 lost its worker b and no standby is free"
EXHAUSTED = PoolExhausted(**J, generation=1, needed=1, free=0)
STALLED = JobStalled(**J, generation=1, reason=NONE_FREE, unblocked_by=UNBLOCKED_BY)


def test_without_a_standby_the_job_is_stalled_and_says_once_what_would_help() -> None:
    assert outputs(running((9.0, failed("b")))) == (EXHAUSTED, STALLED)
    assert outputs(running((9.0, failed("b")), (9.1, EXHAUSTED))) == (STALLED,)
    assert outputs(running((9.0, failed("b")), (9.1, EXHAUSTED), (9.1, STALLED))) == ()


def test_too_few_standbys_are_not_used_up_one_by_one() -> None:
    state = running((9.0, failed("a", "b")), standbys="d")
    exhausted, stalled = outputs(state)
    assert exhausted == PoolExhausted(**J, generation=1, needed=2, free=1)
    assert isinstance(stalled, JobStalled)
    assert stalled.reason == (
        "rank 0 lost its worker a, rank 1 lost its worker b and only 1 standby is free"
    )


def test_a_worker_that_registers_ends_the_stall() -> None:
    stall = ((9.0, failed("b")), (9.1, EXHAUSTED), (9.1, STALLED))
    replenished = PoolReplenished(**J, worker="d")
    state = running(*stall, (9.5, registered("d", 3)))
    assert outputs(state) == (replenished, B_TO_D)
    state = running(*stall, (9.5, registered("d", 3)), (9.6, replenished), (9.6, B_TO_D))
    assert outputs(state) == ()
    assert state.stalled_since_s is None


def test_a_stall_over_the_timeout_fails_the_job() -> None:
    state = running((9.0, failed("b")), (9.1, EXHAUSTED), (10.0, STALLED))
    assert outputs(state, 3610.0) == ()
    assert the_failure(outputs(state, 3610.1)) == JobFailed(
        **J, reason=f"{NONE_FREE}, for 3600 s (--stall-timeout)", exit_code=3
    )


def test_a_worker_that_held_a_rank_never_gets_one_again() -> None:
    missed = ((9.0, failed("b")), (9.1, B_TO_D), (9.2, aborted(2, "c")))
    without_c = plan(3, (2, "c", "e"), members=(A, member(1, "d"), member(2, "e")), reason="")
    state = running(
        *missed, (9.3, without_c), (9.4, completed(3)), (9.5, failed("a")), standbys="de"
    )
    exhausted, _ = outputs(state)
    assert exhausted == PoolExhausted(**J, generation=3, needed=1, free=0)
