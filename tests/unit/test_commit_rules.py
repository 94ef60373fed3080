"""Each rule of the commit protocol by the shortest history that goes wrong without it.

The product's functions follow the exhaustive model up to the wrong step; there each test says
what the product does instead. REMEMBER stands in test_commit_histories.py.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from tests.unit.commit_model import (
    CUT_OFF,
    HISTORIES,
    ST,
    WORKERS,
    Assignments,
    Product,
    mover_says,
    mover_state,
    reference,
    replay,
)
from tests.unit.commit_steps import follow
from tests.unit.planner_histories import (
    B_TO_D,
    completed,
    decided,
    failed,
    finished,
    only,
    outputs,
    ready,
    registered,
    running,
    step_aborted,
    switched,
    the_plan,
)

from trainmover.runtime import commit
from trainmover.runtime.commit import Phase, ProtocolError
from trainmover.schemas.commands import Answer, Collect, Pull, Resume, Stage, StandBy, Switch
from trainmover.schemas.events import (
    JobCompleted,
    JobStalled,
    MigrationAborted,
    MigrationDecided,
    MigrationSwitched,
    PoolExhausted,
)
from trainmover.schemas.recorded import Recorded
from trainmover.services.contract import Ask, Output
from trainmover.services.mover import decide as mover
from trainmover.services.mover.state import evolve as evolve_mover

MOVED: Assignments = ((0, 1, 2), (0, 3, 2))
"""Rank 1 goes from worker 1 to worker 3 in generation 2."""


def led(rule: str, steps: int | None = None) -> tuple[Product, Any]:
    """The product, and the model's state, after the first steps of the rule's history."""
    model = reference(HISTORIES[rule]["scenario"], rule)
    product, state = Product(model), model.initial()
    for before, label, after in replay(model, HISTORIES[rule]["history"][:steps]):
        follow(product, before, label, after)
        state = after
    return product, state


def collected(product: Product, generation: int, *workers: int) -> dict[str, Answer]:
    """What these workers answer to a collect, at once."""
    for i in workers:
        product.put(i, commit.collect(product.positions[i], generation))
    return {WORKERS[i]: product.answer(i) for i in workers}


def alive(product: Product, state: Any) -> dict[str, Answer]:
    """What the live members of the latest generation answer now."""
    return {WORKERS[i]: product.answer(i) for i in state[1][-1] if state[0][i][ST] == "u"}


def the_decision(said: Sequence[Output]) -> MigrationDecided:
    (event,) = said
    assert isinstance(event, MigrationDecided)
    return event


def the_abort(said: Sequence[Output]) -> MigrationAborted:
    (event,) = said
    assert isinstance(event, MigrationAborted)
    return event


def pulls(said: Sequence[Output]) -> dict[str, tuple[str, str | None]]:
    """Worker -> donor and holder of its own state."""
    asked = [(out.worker, out.command) for out in said if isinstance(out, Ask)]
    return {
        worker: (pull.donor.worker, pull.extras_from.worker if pull.extras_from else None)
        for worker, pull in asked
        if isinstance(pull, Pull)
    }


def test_cut_a_result_that_comes_after_the_answer_changes_nothing() -> None:
    product, _ = led("CUT")
    p = product.positions[1]
    assert (p.phase, p.committed) == (Phase.HOLDING, 0)
    obeyed = commit.obey(p, 2, 0)
    assert obeyed is not None
    assert (obeyed.phase, obeyed.committed) == (Phase.READY, 0)


def test_promise_no_command_of_an_older_generation_is_obeyed_after_an_answer() -> None:
    product, state = led("PROMISE", 13)
    p = product.positions[2]
    assert commit.resume(p, 2, 0, last=False) is None
    assert commit.obey(p, 2, 0) is None
    assert commit.collect(p, 2) is None
    assert commit.restored(p, 2, 0) is None
    answers = collected(product, 3, 2, 3, 4)
    assert the_decision(mover_says(mover_state(state[1], 3), answers)).target == 0
    for i in (2, 3):
        obeyed = commit.obey(product.positions[i], 3, 0)
        assert obeyed is not None
        assert obeyed.phase is Phase.READY


def test_all_nothing_is_decided_while_an_answer_is_missing() -> None:
    product, state = led("ALL", 9)
    plan, answers = mover_state(state[1], 2), dict(product.answers[2, 1])
    said = mover_says(plan, answers)
    asked = [(out.worker, type(out.command)) for out in said if isinstance(out, Ask)]
    assert asked == [("a", Collect), ("d", Collect)]
    assert len(said) == 2
    late = mover_says(plan, answers, now_s=mover.COLLECT_S + 0.1)
    assert the_abort(late).missing == ("a", "d")
    answers |= collected(product, 2, 0, 3)
    assert the_decision(mover_says(plan, answers)).target == 1


def test_keep2_the_extras_of_the_open_step_outlive_those_of_the_next() -> None:
    product, state = led("KEEP2", -1)
    said = mover_says(mover_state(state[1], 2, 0), alive(product, state))
    assert pulls(said) == {"d": ("b", "b")}


def test_rebuddy_the_first_generation_starts_with_its_extras_at_the_buddies() -> None:
    product, state = led("REBUDDY", -1)
    said = mover_says(mover_state(state[1], 2, 0), alive(product, state))
    assert pulls(said) == {"d": ("b", "b")}


def test_rebuddy_no_generation_starts_before_all_extras_are_at_the_buddies() -> None:
    product, state = led("REBUDDY", -1)
    product.put(3, commit.restored(product.positions[3], 2, 0))
    product.put(3, commit.keep(product.positions[3], 2, 2, 0))
    assert product.positions[3].kept == {2: (0,)}
    answers = {WORKERS[i]: product.answer(i, Stage.SWITCHED) for i in (1, 2)}
    answers["d"] = product.answer(3, Stage.RESTORED)
    said = mover_says(mover_state(state[1], 2, 0), answers)
    asked = [(out.worker, type(out.command)) for out in said if isinstance(out, Ask)]
    assert asked == [("d", Switch)]
    assert len(said) == 1


def test_xknow_extras_of_the_step_after_the_next_prove_the_commit() -> None:
    product, state = led("XKNOW", 10)
    answers = collected(product, 2, 1, 2, 3)
    assert (answers["b"].committed, answers["b"].holding) == (1, False)
    assert (answers["c"].committed, answers["c"].holding) == (0, True)
    decision = the_decision(mover_says(mover_state(state[1], 2), answers))
    assert decision.target == 1
    assert [(s.worker, s.extras_from) for s in decision.sources] == [("d", "b")]
    held = commit.obey(product.positions[2], 2, 1)
    assert held is not None
    assert held.phase is Phase.APPLYING


def test_xknow_the_result_that_comes_after_the_extras_changes_nothing() -> None:
    product, _ = led("XKNOW", 5)
    ahead = commit.keep(product.positions[1], 1, 0, 2)
    assert ahead.phase is Phase.APPLYING
    assert commit.result(ahead, 1, 0, commit=True) == ahead


def test_dirtyack_without_a_clean_acknowledgement_the_state_is_lost() -> None:
    product, state = led("DIRTYACK", 14)
    assert product.positions[0].dirty
    assert product.positions[2].dirty
    said = mover_says(mover_state(state[1], 2, 1), alive(product, state))
    assert the_abort(said).state_lost


def test_dirtyack_only_a_clean_acknowledgement_makes_a_donor() -> None:
    product, state = led("DIRTYACK", 13)
    product.put(2, commit.obey(product.positions[2], 2, 1))
    product.end_block(2, poisoned=False)
    plan = mover_state(state[1], 2, 1)
    assert pulls(mover_says(plan, alive(product, state))) == {}
    product.put(2, commit.obey(product.positions[2], 2, 1))
    said = mover_says(plan, alive(product, state))
    assert {worker: donor for worker, (donor, _) in pulls(said).items()} == {"a": "c", "d": "c"}
    with pytest.raises(ProtocolError, match="dirty"):
        commit.resume(product.positions[0], 2, 1, last=False)
    product.put(0, commit.restored(product.positions[0], 2, 1))
    assert commit.resume(product.positions[0], 2, 1, last=False) is not None


def test_tail_a_collective_poisoned_after_the_vote_makes_its_rank_dirty() -> None:
    product, state = led("TAIL", 8)
    answers = collected(product, 2, 0, 2, 3)
    assert (answers["a"].committed, answers["a"].dirty) == (1, False)
    assert the_decision(mover_says(mover_state(state[1], 2), answers)).target == 1
    product.end_block(0, poisoned=True)
    product.put(2, commit.obey(product.positions[2], 2, 1))
    product.end_block(2, poisoned=True)
    for i in (0, 2):
        product.put(i, commit.obey(product.positions[i], 2, 1))
        with pytest.raises(ProtocolError, match="dirty"):
            commit.resume(product.positions[i], 2, 1, last=False)
    said = mover_says(mover_state(state[1], 2, 1), alive(product, state))
    assert the_abort(said).state_lost


def test_exit_a_worker_that_has_finished_is_still_a_donor() -> None:
    product, state = led("EXIT")
    answers = collected(product, 2, 0, 2, 3)
    assert answers["a"].done
    assert answers["c"].done
    decision = the_decision(mover_says(mover_state(state[1], 2), answers))
    assert decision.target == 2
    (source,) = decision.sources
    assert (source.worker, source.donors, source.extras_from) == ("d", ("a", "c"), "c")


def test_exit_the_job_completes_only_when_all_ranks_have_finished() -> None:
    done = [(9.0, finished(worker, rank)) for worker, rank in (("a", 0), ("c", 2))]
    lost = running(*done, (9.0, failed("b")), standbys="d")
    assert the_plan(outputs(lost)).replacements == B_TO_D.replacements
    last = (9.5, finished("d", 1, generation=2))
    recovered = running(*done, (9.0, failed("b")), (9.1, B_TO_D), last, standbys="d")
    assert isinstance(only(outputs(recovered)), JobCompleted)


def test_relink_an_abort_with_nobody_dead_leads_to_a_plan_without_leavers() -> None:
    product, state = led("RELINK")
    assert all(p.phase in CUT_OFF for p in product.positions[:3])
    plan = the_plan(outputs(running((9.0, step_aborted("a")), standbys="d")))
    assert (plan.kind, plan.generation, plan.replacements) == ("relink", 2, ())
    assert [m.worker for m in plan.members] == ["a", "b", "c"]
    same = (*state[1], state[1][0])
    decision = the_decision(mover_says(mover_state(same, 2), collected(product, 2, 0, 1, 2)))
    assert (decision.target, decision.sources) == (0, ())
    for i in (0, 1, 2):
        product.put(i, commit.obey(product.positions[i], 2, 0))
        product.put(i, commit.resume(product.positions[i], 2, 0, last=False))
        assert product.positions[i].phase is Phase.COMPUTING


@pytest.mark.parametrize("refused", ["", "its links are gone"])
def test_wal_the_switch_is_durable_before_the_first_resume_and_never_taken_back(
    refused: str,
) -> None:
    about = {"about": 2, "promised": 2, "stage": Stage.SWITCHED, "empty": False, "set_up": True}
    answers = {w: Answer.model_validate({"worker": w, "committed": 1, **about}) for w in "adc"}
    (first,) = mover_says(mover_state(MOVED, 2, 1), answers)
    assert isinstance(first, MigrationSwitched)
    answers["a"] = answers["a"].model_copy(update={"refused": refused})
    after = mover_state(MOVED, 2, 1, switched=True)
    for now_s in (0.0, 1e6):
        said = mover_says(after, answers, now_s)
        asked = [(out.worker, type(out.command)) for out in said if isinstance(out, Ask)]
        assert asked == [("a", Resume), ("d", Resume), ("c", Resume)]
        assert len(said) == 3


def test_reset_a_worker_that_ever_held_a_rank_is_never_a_joiner() -> None:
    replaced = (
        (9.0, failed("b")),
        (9.1, B_TO_D),
        (9.2, decided(2, 7)),
        (9.3, switched(2)),
        (9.4, completed(2)),
        (10.0, failed("c")),
    )
    exhausted, stalled = outputs(running(*replaced, standbys="d"))
    assert isinstance(exhausted, PoolExhausted)
    assert isinstance(stalled, JobStalled)
    plan = the_plan(outputs(running(*replaced, (11.0, registered("e", 4)), standbys="d")))
    assert [(r.leaver, r.joiner) for r in plan.replacements] == [("c", "e")]


def test_reset_a_worker_that_ever_held_a_rank_never_stands_by() -> None:
    state = mover_state(MOVED, 2)
    here = [registered(worker, place) for place, worker in enumerate("abcde")]
    set_up = [ready(worker, rank) for rank, worker in enumerate("abc")]
    for seq, event in enumerate((*here, *set_up)):
        state = evolve_mover(state, Recorded(seq, 0.0, event))
    said = mover_says(state, {})
    asked = {out.worker for out in said if isinstance(out, Ask) if isinstance(out.command, StandBy)}
    assert asked == {"e"}


def test_fastfail_who_cannot_finish_owes_no_extras_and_ends_every_wait() -> None:
    product, _ = led("FASTFAIL")
    root, gave_up, waits = product.positions[:3]
    assert gave_up.phase is Phase.POISONED
    assert not commit.may_vote(waits, (1,))
    assert commit.failed(root).phase in CUT_OFF
    assert commit.result(waits, 1, 0, commit=False).phase in CUT_OFF
