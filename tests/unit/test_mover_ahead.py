"""A planned switch up to its decision, and what is undone if it does not come to one."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.planner_histories import (
    ASSIGNED,
    A,
    B,
    C,
    J,
    aborted,
    announced,
    cancelled,
    completed,
    decided,
    failed,
    member,
    plan,
    ready,
    registered,
    submitted,
    switched,
)

from trainmover.schemas.base import Event
from trainmover.schemas.commands import (
    Answer,
    Collect,
    Decided,
    Drop,
    Freeze,
    Prepare,
    Pull,
    Retire,
    Stage,
    StandBy,
)
from trainmover.schemas.events import (
    MigrationAborted,
    MigrationDecided,
    MigrationPrepared,
    StandbyWarmed,
)
from trainmover.schemas.recorded import Recorded
from trainmover.services.contract import Ask, Inputs, Output
from trainmover.services.mover.ahead import FREEZE_S, HASTE_S, PREPARE_S
from trainmover.services.mover.decide import SERVICE
from trainmover.services.mover.state import State

D = member(1, "d")
MOVE = plan(2, (1, "b", "d"), members=(A, D, C), reason="b is to go").model_copy(
    update={"kind": "planned", "leavers": (B,)}
)
PREPARED = MigrationPrepared(**J, generation=2, incident="g2")
PLANNED_S, PREPARED_S = 10.0, 20.0
GROUND: tuple[tuple[float, Event], ...] = (
    (0.0, submitted()),
    *((1.0, registered(worker, index)) for index, worker in enumerate("abcd")),
    (1.0, ASSIGNED),
    (2.0, StandbyWarmed(**J, worker="d", rank=1, warm_s=1.0)),
    (9.0, announced("a", "b", "c")),
    (PLANNED_S, MOVE),
)
READY = (*GROUND, (PREPARED_S, PREPARED))
ALL = {"a", "b", "c", "d"}


def fold(*timed: tuple[float, Event]) -> State:
    state = SERVICE.initial
    for seq, (time_s, event) in enumerate(timed, 1):
        state = SERVICE.evolve(state, Recorded(seq, time_s, event))
    return state


def says(
    state: State, answers: Mapping[str, Answer] | None = None, now_s: float = 21.0, **up: float
) -> Sequence[Output]:
    inputs = Inputs(now_s=now_s, up_since_s=up.get("up_since_s", 0.0), answers=answers or {})
    return SERVICE.decide(state, inputs)


def asked(outputs: Sequence[Output], kind: type) -> set[str]:
    """Who is asked for this, and all of them for nothing else."""
    assert all(isinstance(out, Ask) and isinstance(out.command, kind) for out in outputs), outputs
    return {out.worker for out in outputs if isinstance(out, Ask)}


def holder(worker: str, **more: Any) -> Answer:
    """A rank of generation 1 with seven steps committed."""
    facts = {"running": 1, "promised": 1, "committed": 7, "set_up": True, "empty": False, **more}
    return Answer.model_validate({"worker": worker, **facts})


def frozen(*workers: str, generation: int = 2) -> dict[str, Answer]:
    return {w: holder(w, frozen=generation) for w in workers}


JOINER = {"d": Answer(worker="d", set_up=True, prepared=2)}


def the_abort(outputs: Sequence[Output]) -> MigrationAborted:
    (said,) = outputs
    assert isinstance(said, MigrationAborted)
    assert not said.state_lost
    return said


# ---- prepare


def test_only_the_joiner_is_asked_until_it_is_prepared() -> None:
    (ask,) = says(fold(*GROUND))
    assert isinstance(ask, Ask)
    assert isinstance(ask.command, Prepare)
    assert (ask.worker, ask.command.generation, ask.command.joiners) == ("d", 2, (1,))
    assert ask.command.members == MOVE.members
    other = {"d": Answer(worker="d", prepared=1)}  # of an older plan
    assert asked(says(fold(*GROUND), other), Prepare) == {"d"}
    assert says(fold(*GROUND), JOINER) == [PREPARED]


def test_of_several_joiners_those_are_asked_that_are_not_prepared_yet() -> None:
    both = plan(
        2, (1, "b", "d"), (2, "c", "e"), members=(A, D, member(2, "e")), reason="both"
    ).model_copy(update={"kind": "planned", "leavers": (B, C)})
    state = fold(*GROUND[:-1], (5.0, registered("e", 4)), (PLANNED_S, both))
    assert asked(says(state), Prepare) == {"d", "e"}
    assert asked(says(state, JOINER), Prepare) == {"e"}


def test_a_joiner_that_cannot_be_prepared_ends_the_plan_with_its_error() -> None:
    broken = {"d": Answer(worker="d", prepare_error="c is not at tcp:h:1")}
    said = the_abort(says(fold(*GROUND), broken))
    assert said.reason == "d cannot be prepared: c is not at tcp:h:1"
    assert said.missing == ("d",)


def test_a_joiner_that_is_not_prepared_in_time_is_missing() -> None:
    state = fold(*GROUND)
    assert asked(says(state, now_s=PLANNED_S + PREPARE_S), Prepare) == {"d"}
    said = the_abort(says(state, now_s=PLANNED_S + PREPARE_S + 0.1))
    assert (said.reason, said.missing) == ("not prepared within 900 s", ("d",))


def test_a_mover_that_came_later_gives_the_joiner_the_whole_time() -> None:
    late = PLANNED_S + PREPARE_S
    assert asked(says(fold(*GROUND), now_s=late + 1, up_since_s=late), Prepare) == {"d"}


# ---- freeze


def test_every_rank_that_runs_is_asked_to_freeze_and_nobody_to_end_its_generation() -> None:
    state = fold(*READY)
    assert asked(says(state, JOINER), Freeze) == {"a", "b", "c"}
    assert asked(says(state, {**JOINER, **frozen("a")}), Freeze) == {"b", "c"}
    assert asked(says(state, {**JOINER, **frozen("a", "b", "c", generation=1)}), Freeze) == {
        *("a", "b", "c")
    }


def test_when_all_are_frozen_it_is_decided_with_the_leaver_as_the_donor_of_everything() -> None:
    (said,) = says(fold(*READY), {**JOINER, **frozen("a", "b", "c")})
    assert isinstance(said, MigrationDecided)
    assert (said.generation, said.target, said.dirty, said.holding) == (2, 7, (), ())
    (source,) = said.sources
    assert (source.rank, source.worker, source.extras_from) == (1, "d", "b")
    assert source.donors[0] == "b"


def test_a_mover_that_starts_again_hears_the_joiner_before_it_decides() -> None:
    assert asked(says(fold(*READY), frozen("a", "b", "c")), Freeze) == {"d"}


def test_who_does_not_come_to_the_end_of_a_step_in_time_is_named_and_keeps_its_rank() -> None:
    state, answers = fold(*READY), {**JOINER, **frozen("a", "b")}
    assert asked(says(state, answers, now_s=PREPARED_S + FREEZE_S), Freeze) == {"c"}
    said = the_abort(says(state, answers, now_s=PREPARED_S + FREEZE_S + 0.1))
    assert (said.reason, said.missing) == ("c did not stop within 600 s", ())


def test_a_rank_that_is_through_ends_the_plan() -> None:
    answers = {**JOINER, **frozen("a", "b"), "c": holder("c", done=True)}
    assert the_abort(says(fold(*READY), answers)).reason == "the job ends before the switch"


def test_ranks_that_stand_at_different_steps_are_not_switched() -> None:
    answers = {**JOINER, **frozen("a", "b"), "c": holder("c", frozen=2, committed=8)}
    assert the_abort(says(fold(*READY), answers)).reason.startswith("bug: ")


@pytest.mark.parametrize("ground", [GROUND, READY])
@pytest.mark.parametrize("dead", ["a", "b", "d"])
def test_whoever_ends_before_the_decision_ends_the_plan(
    ground: tuple[tuple[float, Event], ...], dead: str
) -> None:
    state = fold(*ground, (20.5, failed(dead)))
    said = the_abort(says(state, {**JOINER, **frozen("a", "b", "c")}))
    assert (said.reason, said.missing) == (f"{dead} ended before the switch", (dead,))


# ---- a deadline


def hurried(deadline: float) -> tuple[tuple[float, Event], ...]:
    """The leaver is announced once more, for a sooner end."""
    return (*GROUND, (11.0, announced("b", name="sooner", deadline=deadline)))


def test_a_joiner_is_not_waited_for_when_the_deadline_of_its_leaver_is_near() -> None:
    state = fold(*hurried(20.0))
    assert asked(says(state, now_s=20.0 - HASTE_S - 0.1), Prepare) == {"d"}
    (said,) = says(state, now_s=20.0 - HASTE_S)
    assert isinstance(said, MigrationPrepared)
    assert said.unready == ("d",)
    assert says(state, JOINER, now_s=20.0) == [PREPARED]


def test_a_deadline_that_was_cancelled_hurries_nobody() -> None:
    state = fold(*hurried(20.0), (12.0, cancelled("sooner")))
    assert asked(says(state, now_s=30.0), Prepare) == {"d"}


def test_with_a_joiner_that_is_not_ready_it_is_decided_when_the_ranks_stand() -> None:
    unready = PREPARED.model_copy(update={"unready": ("d",)})
    state = fold(*hurried(20.0), (PREPARED_S, unready))
    assert asked(says(state), Freeze) == {"a", "b", "c"}
    half = {"d": Answer(worker="d"), **frozen("a", "b", "c")}
    (said,) = says(state, half)
    assert isinstance(said, MigrationDecided)
    assert said.sources[0].donors[0] == said.sources[0].extras_from == "b"


# ---- dropped


@pytest.mark.parametrize("ground", [GROUND, READY])
def test_a_plan_whose_interruption_is_cancelled_is_dropped_and_nobody_is_missing(
    ground: tuple[tuple[float, Event], ...],
) -> None:
    state = fold(*ground, (21.0, cancelled()))
    said = the_abort(says(state, {**JOINER, **frozen("a", "b", "c")}))
    assert (said.reason, said.missing) == ("its interruption was cancelled", ())
    stands = fold(*ground, (20.9, announced("b", name="another")), (21.0, cancelled()))
    assert not any(isinstance(out, MigrationAborted) for out in says(stands, JOINER))


def test_nobody_is_asked_to_stop_for_a_plan_before_it_knows_that_the_last_one_is_over() -> None:
    again = MOVE.model_copy(update={"generation": 3})
    state = fold(*READY, (21.0, again), (22.0, PREPARED.model_copy(update={"generation": 3})))
    joiner = {"d": Answer(worker="d", set_up=True, prepared=3, dropped=2)}
    said = says(state, {**joiner, **frozen("a"), "b": holder("b", dropped=2)})
    assert {(o.worker, type(o.command)) for o in said if isinstance(o, Ask)} == {
        *((worker, Drop) for worker in "ac"),
        ("b", Freeze),
    }


def not_told(state: State, answers: Mapping[str, Answer]) -> set[str]:
    return asked(says(state, answers), Drop)


@pytest.mark.parametrize("ground", [GROUND, READY])
def test_who_heard_of_a_plan_that_comes_to_nothing_is_told_until_it_says_so(
    ground: tuple[tuple[float, Event], ...],
) -> None:
    state = fold(*ground, (30.0, aborted(2)))
    assert not_told(state, {}) == ALL
    answers = {"a": holder("a", dropped=2), "d": Answer(worker="d", dropped=1), **frozen("b")}
    assert not_told(state, answers) == {"b", "c", "d"}
    told = {w: Answer(worker=w, dropped=2) for w in ALL}
    assert says(state, told) == []


def test_the_dead_are_not_told() -> None:
    assert not_told(fold(*READY, (25.0, failed("d")), (30.0, aborted(2, "d"))), {}) == {
        *("a", "b", "c")
    }


def test_a_crash_takes_the_place_of_a_plan_that_is_not_decided_and_only_others_are_told() -> None:
    crash = plan(3, (2, "c", "e"), members=(A, B, member(2, "e")), reason="c died")
    state = fold(*READY, (21.0, failed("c")), (21.1, crash))
    collects = says(state, {**JOINER, **frozen("a", "b")})
    assert {(o.worker, type(o.command)) for o in collects if isinstance(o, Ask)} == {
        *((worker, Collect) for worker in "abe"),
        *((worker, Drop) for worker in "abd"),
    }
    promised = {w: holder(w, about=3, promised=3, stage=Stage.COLLECTED) for w in "ab"}
    late = [o for o in says(state, promised) if isinstance(o, Ask) and isinstance(o.command, Drop)]
    assert [o.worker for o in late] == ["d"]


def test_a_joiner_that_was_not_needed_is_a_standby_again() -> None:
    set_up = [(1.5, ready(worker, rank)) for rank, worker in enumerate("abc")]
    base = [*GROUND[:6], *set_up, *GROUND[-2:]]  # it has not warmed up yet
    state = fold(*base, (30.0, aborted(2)))
    told = {w: Answer(worker=w, dropped=2) for w in ALL}
    assert asked(says(state, told), StandBy) == {"d"}
    assert asked(says(fold(*base), told), Prepare) == {"d"}


def test_of_two_movers_that_disagree_the_first_counts() -> None:
    dropped = fold(*READY, (30.0, aborted(2)), (30.0, decided(2, 7)))
    assert dropped.decided is None
    assert not_told(dropped, {}) == ALL
    under_way = fold(*READY, (30.0, decided(2, 7)), (30.0, aborted(2)))
    assert under_way.dropped is None
    assert says(under_way, frozen("a", "b", "c")) == []  # the planner's next plan comes first


# ---- after the decision


def test_after_the_decision_all_of_them_the_leaver_too_end_the_old_generation() -> None:
    state = fold(*READY, (30.0, decided(2, 7)))
    assert asked(says(state, {**JOINER, **frozen("a", "b", "c")}), Collect) == ALL


@pytest.mark.parametrize("late", ["a", "b", "c", "abc"])
def test_where_every_rank_moves_no_joiner_is_faster_than_its_leaver(late: str) -> None:
    """Joiners have obeyed before leavers have: nothing is lost, their answers are on the way."""
    joiners = tuple(member(rank, name) for rank, name in enumerate("xyz"))
    move = plan(
        2, *((i, "abc"[i], "xyz"[i]) for i in range(3)), members=joiners, reason="all go"
    ).model_copy(update={"kind": "planned", "leavers": (A, B, C)})
    start = (*GROUND[:-1], *((5.0, registered(w, i)) for i, w in enumerate("xyz", 4)))
    state = fold(*start, (10.0, move), (20.0, PREPARED), (30.0, decided(2, 7)))
    answers = {
        w: Answer(worker=w, about=2, promised=2, stage=Stage.OBEYED, set_up=True) for w in "xyz"
    } | {
        w: holder(w, about=2, promised=2, stage=Stage.COLLECTED if w in late else Stage.RESTORED)
        for w in "abc"
    }
    said = says(state, answers)
    assert {o.worker for o in said if isinstance(o, Ask) and isinstance(o.command, Decided)} == {
        *late
    }
    pulls = {
        o.worker: o.command.donor.worker
        for o in said
        if isinstance(o, Ask) and isinstance(o.command, Pull)
    }
    assert pulls == {"xyz"["abc".index(w)]: w for w in "abc" if w not in late}
    assert all(isinstance(o, Ask) for o in said)


def test_a_leaver_that_dies_after_the_decision_is_not_waited_for() -> None:
    state = fold(*READY, (30.0, decided(2, 7)), (30.1, failed("b")))
    assert asked(says(state, {**JOINER, **frozen("a", "c")}), Collect) == {"a", "c", "d"}


def test_the_leaver_goes_when_links_and_state_are_in_place() -> None:
    decision = (*READY, (30.0, decided(2, 7)))
    for events in ((*decision,), (*decision, (31.0, aborted(2)))):
        assert fold(*events).released == frozenset()
    state = fold(*decision, (31.0, switched(2)), (32.0, completed(2)))
    (ask,) = says(state)
    assert isinstance(ask, Ask)
    assert (ask.worker, type(ask.command)) == ("b", Retire)
    assert (
        says(fold(*decision, (31.0, switched(2)), (32.0, completed(2)), (33.0, failed("b")))) == []
    )


@pytest.mark.parametrize(
    ("decision", "goes"), [((30.0, decided(2, 7)), {"d"}), ((30.0, aborted(2)), set[str]())]
)
def test_a_joiner_whose_leaver_is_back_goes_if_it_was_decided(
    decision: tuple[float, Event], goes: set[str]
) -> None:
    back = plan(3, (2, "c", "e"), members=(A, B, member(2, "e")), reason="c died, b is back")
    assert fold(*READY, decision, (31.0, back)).released == goes


def test_a_joiner_that_stays_in_its_rank_does_not_go() -> None:
    again = plan(3, (1, "b", "d"), members=(A, D, C), reason="too late")
    assert fold(*READY, (30.0, decided(2, 7)), (31.0, aborted(2)), (31.5, again)).released == set()


def test_a_joiner_that_could_not_be_prepared_goes_and_nobody_else() -> None:
    unready = aborted(2).model_copy(update={"missing": ("d",)})
    assert fold(*GROUND, (30.0, unready)).released == {"d"}
    dead = aborted(2).model_copy(update={"missing": ("a", "b")})
    assert fold(*GROUND, (30.0, dead)).released == set()
    assert fold(*READY, (29.0, decided(2, 7)), (30.0, unready)).released == set()


ANSWERS = st.fixed_dictionaries(
    {},
    optional={
        worker: st.builds(
            holder,
            st.just(worker),
            frozen=st.integers(0, 3),
            dropped=st.integers(0, 2),
            committed=st.just(7),
            done=st.booleans(),
        )
        for worker in "abc"
    }
    | {
        "d": st.builds(
            Answer,
            worker=st.just("d"),
            set_up=st.just(True),
            prepared=st.integers(0, 3),
            prepare_error=st.sampled_from(["", "x"]),
        )
    },
)


@settings(max_examples=200, deadline=None)
@given(ANSWERS, st.booleans(), st.floats(0, 2000))
def test_before_the_decision_nothing_is_asked_that_cannot_be_dropped(
    answers: dict[str, Answer], ready: bool, now_s: float
) -> None:
    """WAL: and it is decided only when every rank has said that it stands frozen for this plan."""
    outputs = says(fold(*READY) if ready else fold(*GROUND), answers, now_s)
    for out in outputs:
        if isinstance(out, Ask):
            assert isinstance(out.command, Prepare | Freeze)
        elif isinstance(out, MigrationDecided):
            assert len(outputs) == 1
            assert ready
            assert answers.keys() == ALL
            assert all(answers[w].frozen == 2 and not answers[w].done for w in "abc")
