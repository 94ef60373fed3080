"""Announced interruptions: who gives a rank to whom while training goes on, and who is back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.planner_histories import (
    ASSIGNED,
    GROUND,
    A,
    B,
    C,
    J,
    aborted,
    announced,
    completed,
    decided,
    failed,
    fold,
    member,
    outputs,
    registered,
    running,
    switched,
    the_plan,
)

from trainmover.schemas.base import Event
from trainmover.schemas.events import (
    JobStarted,
    MigrationPlanned,
    PoolExhausted,
    Replacement,
)
from trainmover.services.planner.moves import MAX_TRIES
from trainmover.services.planner.state import Phase, State

D = member(1, "d")
MOVE = MigrationPlanned(
    **J,
    generation=2,
    incident="g2",
    kind="planned",
    replacements=(Replacement(rank=1, leaver="b", joiner="d"),),
    members=(A, D, C),
    leavers=(B,),
    reason="rank 1 moves from b to d (maintenance: new firmware)",
)
ASKED = (9.0, announced("b", reason="new firmware"))
PENDING = (ASKED, (9.1, MOVE))
DECIDED = (*PENDING, (9.5, decided(2, 7)))


def moves(*timed: tuple[float, Event], standbys: str = "de") -> State:
    return running(*timed, standbys=standbys)


# ---- a plan


def test_a_worker_that_is_announced_gives_its_rank_to_a_standby() -> None:
    assert outputs(moves(ASKED)) == (MOVE,)


def test_all_that_are_announced_move_as_one_whoever_announced_them() -> None:
    state = moves((9.0, announced("c", "a")), (9.0, announced("x", name="move-2")))
    plan = the_plan(outputs(state))
    assert [(r.rank, r.leaver, r.joiner) for r in plan.replacements] == [
        (0, "a", "d"),
        (2, "c", "e"),
    ]
    assert plan.leavers == (A, C)
    assert plan.members == (member(0, "d"), B, member(2, "e"))
    assert plan.kind == "planned"
    assert plan.reason.endswith("(maintenance)")


def test_nothing_moves_before_the_job_has_started() -> None:
    early = fold(*GROUND[:-1], (3.0, registered("d", 3)), ASKED)
    assert not [e for e in outputs(early) if isinstance(e, MigrationPlanned)]
    begun = fold(*GROUND[:-1], (3.0, registered("d", 3)), ASKED, (9.1, JobStarted(**J)))
    assert outputs(begun) == (MOVE,)


def test_one_move_at_a_time() -> None:
    second = (9.2, announced("c", name="move-2"))
    assert outputs(moves(*PENDING, second)) == ()
    assert outputs(moves(*DECIDED, second)) == ()
    over = moves(*DECIDED, (9.6, switched(2)), (9.7, completed(2)), second)
    assert [(r.leaver, r.joiner) for r in the_plan(outputs(over)).replacements] == [("c", "e")]


def test_a_move_that_is_over_is_not_made_again_however_often_it_is_announced() -> None:
    over = (*DECIDED, (9.6, switched(2)), (9.7, completed(2)))
    assert outputs(moves(*over, ASKED)) == ()
    assert outputs(moves(*over, (9.8, announced("b", name="move-2")))) == ()


def test_without_enough_standbys_it_is_said_once_and_the_move_waits() -> None:
    (said,) = outputs(moves(ASKED, standbys=""))
    assert isinstance(said, PoolExhausted)
    assert (said.generation, said.needed, said.free) == (1, 1, 0)
    assert outputs(moves(ASKED, (9.1, said), standbys="")) == ()
    state = moves(ASKED, (9.1, said), (9.2, registered("d", 3)), standbys="")
    replenished, plan = outputs(state)
    assert (replenished.TYPE, plan) == ("pool.replenished", MOVE)


def test_a_pending_joiner_is_no_free_standby() -> None:
    state = moves(*PENDING)
    assert [w.worker for w in state.free] == ["e"]
    crash = the_plan(outputs(moves(*PENDING, (9.2, failed("c")))))
    assert [(r.leaver, r.joiner) for r in crash.replacements] == [("c", "e")]


def test_standbys_are_for_the_lost_first() -> None:
    state = moves(ASKED, (9.0, failed("a", "c")), standbys="d")
    said = outputs(state)
    assert [event.TYPE for event in said] == ["pool.exhausted", "job.stalled"]
    told = moves(ASKED, (9.0, failed("a", "c")), *((9.1, e) for e in said), standbys="d")
    assert outputs(told) == ()


def test_a_move_that_is_too_large_waits_and_others_do_not_wait_for_it() -> None:
    both = (9.0, announced("b", "c", name="both"))
    (said,) = outputs(moves(both, standbys="d"))
    assert isinstance(said, PoolExhausted)
    assert (said.needed, said.free) == (2, 1)
    exhausted, planned = outputs(moves(both, (9.1, announced("a", name="one")), standbys="d"))
    assert isinstance(exhausted, PoolExhausted)
    assert isinstance(planned, MigrationPlanned)
    assert [(r.rank, r.leaver, r.joiner) for r in planned.replacements] == [(0, "a", "d")]


# ---- before it is decided


def test_until_it_is_decided_the_assignment_before_is_in_force() -> None:
    pending = moves(*PENDING)
    assert (pending.latest.generation, pending.members) == (1, ASSIGNED.members)
    assert (pending.generation, "d" in pending.ranks) == (2, False)
    in_force = moves(*DECIDED)
    assert (in_force.latest.generation, in_force.members) == (2, MOVE.members)
    assert in_force.ranks["d"] == 1
    assert in_force.latest.phase is Phase.PLANNED


def test_a_crash_takes_the_place_of_a_pending_move_in_an_incident_of_its_own() -> None:
    state = moves(*PENDING, (9.2, failed("c")))
    plan = the_plan(outputs(state))
    assert (plan.generation, plan.incident, plan.kind, plan.leavers) == (3, "g3", "crash", ())
    assert plan.members == (A, B, member(2, "e"))
    after = moves(
        *PENDING,
        (9.2, failed("c")),
        (9.3, plan),
        (9.4, decided(3, 7, "g3")),
        (9.5, switched(3)),
        (9.6, completed(3, "g3")),
    )
    again = the_plan(outputs(after))  # its standby was not touched
    assert (again.generation, again.incident, again.kind) == (4, "g4", "planned")
    assert again.replacements == MOVE.replacements


def test_a_dead_leaver_is_replaced_as_after_any_crash() -> None:
    plan = the_plan(outputs(moves(*PENDING, (9.2, failed("b")))))
    assert (plan.kind, plan.replacements[0].leaver, plan.leavers) == ("crash", "b", ())


def test_a_move_that_comes_to_nothing_is_tried_three_times() -> None:
    timed: list[tuple[float, Event]] = [ASKED]
    for generation in range(2, 2 + MAX_TRIES):
        plan = the_plan(outputs(moves(*timed)))
        assert (plan.generation, plan.incident) == (generation, f"g{generation}")
        timed += [(10.0, plan), (11.0, aborted(generation))]
    assert MAX_TRIES == 3
    state = moves(*timed)
    assert outputs(state) == ()
    assert state.members == ASSIGNED.members


def test_a_joiner_that_could_not_be_prepared_is_not_taken_again() -> None:
    plan = the_plan(outputs(moves(*PENDING, (9.2, aborted(2, "d")))))
    assert [(r.leaver, r.joiner) for r in plan.replacements] == [("b", "e")]


def test_a_decision_after_the_abort_counts_for_nothing() -> None:
    state = moves(*PENDING, (9.2, aborted(2)), (9.3, decided(2, 7)))
    assert state.latest.generation == 1
    assert the_plan(outputs(state)).generation == 3


# ---- after it is decided


def test_a_leaver_is_back_in_its_rank_when_its_joiner_dies_before_the_switch() -> None:
    state = moves(*DECIDED, (9.6, failed("d")))
    plan = the_plan(outputs(state))
    assert (plan.generation, plan.incident, plan.kind) == (3, "g2", "relink")
    assert plan.members == (A, B, C)
    assert (plan.replacements, plan.leavers) == ((), ())
    assert "b takes its rank back" in plan.reason


def test_a_leaver_is_back_when_another_rank_dies_before_the_switch() -> None:
    plan = the_plan(outputs(moves(*DECIDED, (9.6, failed("c")))))
    assert plan.members == (A, B, member(2, "e"))
    assert [(r.leaver, r.joiner) for r in plan.replacements] == [("c", "e")]


def test_a_leaver_is_back_when_the_migration_is_aborted() -> None:
    plan = the_plan(outputs(moves(*DECIDED, (9.6, aborted(2)))))
    assert (plan.members, plan.incident) == ((A, B, C), "g2")


def test_after_the_switch_a_dead_joiner_is_replaced_and_the_leaver_is_not_back() -> None:
    plan = the_plan(outputs(moves(*DECIDED, (9.6, switched(2)), (9.7, failed("d")))))
    assert [(r.rank, r.leaver, r.joiner) for r in plan.replacements] == [(1, "d", "e")]
    assert B not in plan.members


@pytest.mark.parametrize("order", ["bd", "db"])
def test_a_dead_leaver_is_not_back(order: str) -> None:
    state = moves(*DECIDED, *((9.6, failed(worker)) for worker in order))
    plan = the_plan(outputs(state))
    assert plan.members == (A, member(1, "e"), C)
    assert [(r.leaver, r.joiner) for r in plan.replacements] == [("d", "e")]


def test_a_leaver_alone_may_die_after_the_decision() -> None:
    assert outputs(moves(*DECIDED, (9.6, failed("b")))) == ()


def test_a_move_that_was_undone_is_planned_again_and_was_one_of_the_tries() -> None:
    def undone(state: list[tuple[float, Event]], generation: int, joiner: str) -> None:
        incident = f"g{generation}"
        state.append((10.0, decided(generation, 7 + generation, incident)))
        state.append((10.1, failed(joiner)))
        back = the_plan(outputs(moves(*state, standbys="defg")))
        assert back.members == ASSIGNED.members
        later = generation + 1
        for event in (back, decided(later, 7 + generation, incident), switched(later)):
            state.append((10.2, event))
        state.append((10.3, completed(later, incident)))

    timed: list[tuple[float, Event]] = [ASKED]
    for joiner in "def":
        plan = the_plan(outputs(moves(*timed, standbys="defg")))
        assert plan.replacements[0].joiner == joiner
        timed.append((9.9, plan))
        undone(timed, plan.generation, joiner)
    assert outputs(moves(*timed, standbys="defg")) == ()


THINGS = st.sampled_from(
    [
        *("announce", "say", "prepared", "decide", "switch", "complete", "abort"),
        *("fail a", "fail b", "fail c", "fail joiner", "standby"),
    ]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(THINGS, max_size=30))
def test_whatever_happens_each_plan_names_live_workers_once_and_nobody_who_gave_its_rank_away(
    things: list[str],
) -> None:
    timed = list[tuple[float, Event]]((*GROUND, (3.0, registered("s0", 3))))
    plans, dead, given_away, standbys = list[MigrationPlanned](), set[str](), set[str](), 1
    said: set[tuple[str, int]] = set()
    for thing in things:
        last = plans[-1] if plans else None
        generation = last.generation if last else 1
        incident = last.incident if last else "g2"
        event: Event | None = None
        match thing.split():
            case ["announce"]:
                event = announced("a", "b", name=f"move-{len(timed)}")
            case ["standby"]:
                standbys += 1
                event = registered(f"s{standbys}", 3 + standbys)
            case ["fail", who]:
                joiners = [r.joiner for r in last.replacements] if last else []
                name = joiners[0] if who == "joiner" and joiners else who
                event = failed(name) if name != "joiner" else None
                dead |= {name}
            case ["say"]:
                event = next(
                    (e for e in outputs(fold(*timed)) if isinstance(e, MigrationPlanned)), None
                )
                if isinstance(event, MigrationPlanned):
                    workers = [m.worker for m in event.members]
                    assert len(set(workers)) == len(workers) == 3
                    assert not set(workers) & dead
                    assert not set(workers) & given_away
                    assert {m.worker for m in event.leavers} <= {
                        r.leaver for r in event.replacements
                    }
                    assert event.generation == generation + 1
                    plans.append(event)
            case ["decide"] if last:
                event = decided(generation, 7, incident)
            case ["switch"] if last and ("decide", generation) in said:
                given_away |= {m.worker for m in last.leavers}
                event = switched(generation)
            case ["complete"] if last and ("switch", generation) in said:
                event = completed(generation, incident)
            case ["abort"] if last and ("switch", generation) not in said:
                event = aborted(generation)
            case _:
                pass
        if event is not None and (thing in ("say", "announce", "standby") or thing[:4] == "fail"):
            timed.append((9.0, event))
        elif event is not None and (thing, generation) not in said:
            said.add((thing, generation))
            timed.append((9.0, event))
        if any(e.TYPE == "job.failed" for e in outputs(fold(*timed))):
            return
