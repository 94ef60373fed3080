"""What the vote's tree adds up is the same whatever the shape of the tree."""

from functools import reduce
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from trainmover.runtime.ballot import Ballot

# Eighths of small integers: sums of a few are exact in any order.
EXACT = st.integers(-(2**20), 2**20).map(lambda n: n / 8)
NAMES = st.sampled_from(["loss", "tokens", "accuracy"])
BALLOTS = st.builds(
    Ballot,
    failed=st.booleans(),
    stop=st.booleans(),
    freeze=st.integers(0, 2**32 - 1),
    numbers=st.dictionaries(NAMES, st.tuples(EXACT, st.integers(0, 3))),
    replicas=st.dictionaries(
        st.sampled_from(["model/pp=0", "model/pp=1", "optimizer/"]), st.sampled_from("ab")
    ),
    differing=st.sampled_from([(), ("loader",)]),
)


def in_any_tree(ballots: list[Ballot], data: st.DataObject) -> Ballot:
    left = list(ballots)
    while len(left) > 1:
        a = left.pop(data.draw(st.integers(0, len(left) - 1)))
        b = left.pop(data.draw(st.integers(0, len(left) - 1)))
        left.append(a.plus(b))
    return left[0]


def seen(ballot: Ballot) -> dict[str, Any]:
    """Without `replicas`: of those that differ either one is left."""
    return {
        "failed": ballot.failed,
        "stop": ballot.stop,
        "freeze": ballot.freeze,
        "numbers": ballot.numbers,
        "averages": ballot.averages,
        "differing": ballot.differing,
    }


@settings(max_examples=40)
@given(st.lists(BALLOTS, min_size=1, max_size=6), st.data())
def test_every_tree_comes_to_the_same_result(ballots: list[Ballot], data: st.DataObject) -> None:
    assert seen(in_any_tree(ballots, data)) == seen(reduce(Ballot.plus, ballots))


@settings(max_examples=40)
@given(st.lists(BALLOTS, min_size=1, max_size=6), st.data())
def test_one_failed_and_one_stop_are_enough(ballots: list[Ballot], data: st.DataObject) -> None:
    total = in_any_tree(ballots, data)
    assert total.failed == any(b.failed for b in ballots)
    assert total.stop == any(b.stop for b in ballots)


@settings(max_examples=40)
@given(st.lists(BALLOTS, min_size=1, max_size=6), st.data())
def test_one_rank_that_was_asked_to_freeze_asks_all_and_the_newest_plan_counts(
    ballots: list[Ballot], data: st.DataObject
) -> None:
    assert in_any_tree(ballots, data).freeze == max(b.freeze for b in ballots)


@settings(max_examples=40)
@given(st.lists(BALLOTS, min_size=1, max_size=6), st.data())
def test_objects_of_which_two_replicas_differ_are_named(
    ballots: list[Ballot], data: st.DataObject
) -> None:
    digests: dict[str, set[str]] = {}
    for ballot in ballots:
        for key, digest in ballot.replicas.items():
            digests.setdefault(key, set()).add(digest)
    wrong = {key.split("/")[0] for key, found in digests.items() if len(found) > 1}
    wrong |= {name for ballot in ballots for name in ballot.differing}
    assert in_any_tree(ballots, data).differing == tuple(sorted(wrong))


@settings(max_examples=40)
@given(BALLOTS)
def test_a_ballot_survives_the_way(ballot: Ballot) -> None:
    assert Ballot.from_bytes(ballot.to_bytes()) == ballot


def test_a_number_is_averaged_over_the_ranks_that_reported_it() -> None:
    ballots = [
        Ballot(numbers={"loss": (1.0, 1), "tokens": (8.0, 1)}),
        Ballot(numbers={"loss": (2.0, 1)}),
        Ballot(),
    ]
    assert reduce(Ballot.plus, ballots).averages == {"loss": 1.5, "tokens": 8.0}


def test_shards_of_one_object_are_not_compared_with_each_other() -> None:
    first = Ballot(replicas={"model/pp=0": "a"})
    assert first.plus(Ballot(replicas={"model/pp=1": "b"})).differing == ()
    assert first.plus(Ballot(replicas={"model/pp=0": "b"})).differing == ("model",)
