"""Where a job goes on, from the answers of the members: what is lost, and what is not."""

import pytest

from trainmover.schemas.commands import Answer
from trainmover.schemas.events import MigrationPlanned, Replacement
from trainmover.schemas.layout import Layout
from trainmover.schemas.member import Member
from trainmover.schemas.shards import NOT_SAID, Shards
from trainmover.services.mover.verdict import Verdict, verdict

MEMBERS = tuple(Member(rank=r, worker=w, machine="m", addresses=()) for r, w in enumerate("ac"))
PLAN = MigrationPlanned(
    job="j",
    run="r",
    generation=2,
    incident="g2",
    kind="crash",
    replacements=(Replacement(rank=1, leaver="b", joiner="c"),),
    members=MEMBERS,
    reason="",
)
JOINER = Answer(worker="c")


def stayer(committed: int, **facts: object) -> Answer:
    known = {"worker": "a", "empty": False, "set_up": True, "committed": committed, **facts}
    return Answer.model_validate(known)


def said(layout: str, answer: Answer, shards: Shards = NOT_SAID) -> Verdict:
    return verdict(Layout.parse(layout), PLAN, {"a": answer, "c": JOINER}, shards)


def test_a_joiner_takes_the_shared_state_from_a_replica_and_its_own_from_a_buddy() -> None:
    found = said("dp=2", stayer(3, extras={1: (3,)}))
    assert (found.target, found.setup_again, found.problem) == (3, False, "")
    assert [(s.donors, s.extras_from) for s in found.sources] == [(("a",), "a")]


@pytest.mark.parametrize("layout", ["dp=2", "pp=2"])
def test_what_nobody_holds_is_lost_once_a_step_is_committed(layout: str) -> None:
    found = said(layout, stayer(3))
    assert found.state_lost
    assert "rank 1" in found.problem


def test_what_is_declared_sharded_comes_from_no_rank_of_another_shard() -> None:
    shards = {0: {"model": "", "zero": "dp=0"}, 1: {"model": "", "zero": "dp=1"}}
    assert said("dp=2", stayer(3, extras={1: (3,)}), shards) == Verdict(
        problem="no live rank holds the shard of rank 1 (dp=1: zero): no holder of this shard is "
        "left; in-memory snapshots are not in this version",
        state_lost=True,
    )


def test_what_is_declared_replicated_comes_from_any_rank_that_has_it() -> None:
    shards = {rank: {"model": "pp=all"} for rank in range(2)}
    found = said("pp=2", stayer(3, extras={1: (3,)}), shards)
    assert [(s.donors, s.extras_from) for s in found.sources] == [(("a",), "a")]


@pytest.mark.parametrize("layout", ["dp=2", "pp=2"])
def test_before_the_first_step_set_up_makes_again_what_nobody_holds(layout: str) -> None:
    """The last rank died in its set-up: the others had done theirs and waited for its extras."""
    assert said(layout, stayer(0)) == Verdict(setup_again=True)
    assert said(layout, stayer(0, set_up=False)) == Verdict(setup_again=True)
