"""Ranks that vote over real links: all of them learn the same, or where they stand."""

import select
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from tests.unit.linked_ranks import WITHIN_S, Rank, World, world

from trainmover.runtime.ballot import Ballot
from trainmover.runtime.commit import Phase
from trainmover.runtime.extras import pack
from trainmover.runtime.fence import Revoked
from trainmover.runtime.vote import CHANNEL, FULL
from trainmover.runtime.wire import Kind

ROOT, INNER, LEAF, LOW = range(4)
"""The tree of four ranks: 0 over 1 and 2, 1 over 3."""


@pytest.fixture
def four(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path, 4) as made:
        yield made


def outcome(future: Future[Ballot]) -> Ballot | type[BaseException]:
    error = future.exception(WITHIN_S)
    return future.result() if error is None else type(error)


class At:
    """Stops a rank at one point of its vote until it may go on."""

    def __init__(self, point: str) -> None:
        self._point = point
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, point: str) -> None:
        if point == self._point:
            self.reached.set()
            assert self.go.wait(WITHIN_S)


# ---- a vote that nothing disturbs


def test_every_rank_hears_the_same_result(four: World) -> None:
    ballots = [
        Ballot(numbers={"loss": (float(rank.rank), 1)}, replicas={"model/": "same"})
        for rank in four.ranks
    ]
    totals = four.all(lambda rank: rank.voted(ballots[rank.rank]))
    assert [t.averages for t in totals] == [{"loss": 1.5}] * 4
    assert [t.differing for t in totals] == [()] * 4
    assert [rank.phase for rank in four.ranks] == [Phase.APPLYING] * 4


@pytest.mark.parametrize("stops", range(4))
def test_one_rank_that_wants_to_stop_stops_all(four: World, stops: int) -> None:
    totals = four.all(lambda rank: rank.voted(Ballot(stop=rank.rank == stops)))
    assert all(total.stop and not total.failed for total in totals)


def test_after_a_commit_every_buddy_keeps_the_extras_of_both_steps(four: World) -> None:
    four.all(Rank.voted)
    for rank in four.ranks:
        assert len(rank.vote.buddies) == 2
        for buddy in rank.vote.buddies:
            for version in (0, 1):
                kept = four.ranks[buddy].keeps(rank.rank, version)
                assert kept == {"who": bytes([rank.rank]), "at": bytes([version, 0])}


def test_no_rank_takes_a_result_before_every_rank_has_voted(four: World) -> None:
    points: list[str] = []
    late = At("extras")

    def vote(rank: Rank) -> Ballot:
        def hit(point: str) -> None:
            points.append(point)
            if rank.rank == LOW:
                late(point)

        return rank.voted(hit=hit)

    votes = four.start(four.ranks, vote)
    assert late.reached.wait(WITHIN_S)
    assert four.ranks[LEAF].reaches(Phase.VOTED)
    assert "result" not in points
    late.go.set()
    assert not any(vote.result(WITHIN_S).failed for vote in votes)
    assert points.index("result") > max(i for i, p in enumerate(points) if p == "extras")


def test_a_rank_does_not_vote_before_the_extras_of_its_neighbours_are_here(four: World) -> None:
    leaf, low = four.ranks[LEAF], four.ranks[LOW]
    assert (leaf.vote.neighbours, low.vote.neighbours) == ((ROOT, INNER), (INNER, LEAF))
    votes = four.start(four.ranks[1:], Rank.voted)
    assert low.reaches(Phase.VOTED)
    assert leaf.seat.wait(lambda: 1 in leaf.seat.position.kept[INNER], WITHIN_S)
    four.ranks[ROOT].vote.abort(0)
    assert all(vote.result(WITHIN_S).failed for vote in votes)
    assert (leaf.phase, low.phase) == (Phase.POISONED, Phase.ENDED)


def test_steps_follow_each_other_without_confusion(four: World) -> None:
    def train(rank: Rank) -> list[float]:
        losses = []
        for step in range(5):
            total = rank.voted(Ballot(numbers={"loss": (float(step * rank.rank), 1)}))
            losses.append(total.averages["loss"])
            rank.close_block()
        return losses

    assert four.all(train) == [[step * 1.5 for step in range(5)]] * 4
    assert all(not rank.vote._votes and not rank.vote._results for rank in four.ranks)


def test_a_job_of_one_rank_commits_by_itself(tmp_path: Path) -> None:
    with world(tmp_path, 1) as alone:
        (rank,) = alone.ranks
        assert rank.voted(Ballot(stop=True)).stop
        assert rank.phase is Phase.APPLYING


# ---- FASTFAIL


@pytest.mark.parametrize("fails", range(4))
def test_one_rank_that_cannot_finish_is_heard_by_all_at_once(four: World, fails: int) -> None:
    others = [rank for rank in four.ranks if rank.rank != fails]
    votes = four.start(others, Rank.voted)
    assert all(rank.leaves(Phase.COMPUTING) for rank in others)
    four.ranks[fails].vote.abort(0)
    assert all(vote.result(WITHIN_S).failed for vote in votes)
    assert four.ranks[fails].phase is Phase.POISONED
    # Who had voted was told abort; who had not is poisoned. Nobody applies, nobody is in doubt.
    assert {rank.phase for rank in others} <= {Phase.ENDED, Phase.POISONED}


def test_a_rank_that_has_voted_is_told_abort_and_holds_nothing(four: World) -> None:
    votes = four.start(four.ranks[:3], Rank.voted)
    assert four.ranks[LEAF].reaches(Phase.VOTED)
    four.ranks[LOW].vote.abort(0)
    assert all(vote.result(WITHIN_S).failed for vote in votes)
    assert four.ranks[LEAF].phase is Phase.ENDED


def test_a_rank_that_comes_after_the_abort_does_not_wait(four: World) -> None:
    four.ranks[LOW].vote.abort(0)
    assert four.pool.submit(four.ranks[INNER].voted).result(WITHIN_S).failed
    assert four.pool.submit(four.ranks[ROOT].voted).result(WITHIN_S).failed
    assert four.pool.submit(four.ranks[LEAF].voted).result(WITHIN_S).failed


def test_an_abort_that_nobody_can_hear_any_more_is_no_error(four: World) -> None:
    four.ranks[LOW].collect(2)
    four.ranks[LOW].vote.abort(0)
    assert four.ranks[LOW].phase is Phase.POISONED


# ---- the generation ends in the middle


def test_a_vote_that_is_cut_off_leaves_every_rank_where_it_stood(four: World) -> None:
    votes = four.start(four.ranks[:3], Rank.voted)
    assert four.ranks[LEAF].reaches(Phase.VOTED)
    assert four.ranks[INNER].reaches(Phase.GATHERED)
    assert four.ranks[ROOT].reaches(Phase.GATHERED)
    for rank in four.ranks:
        rank.collect(2)
    assert [outcome(vote) for vote in votes] == [Revoked] * 3
    assert [rank.phase for rank in four.ranks] == [
        Phase.POISONED,
        Phase.POISONED,
        Phase.HOLDING,
        Phase.POISONED,
    ]


def test_the_root_may_have_committed_alone(four: World) -> None:
    knows = At("result")
    votes = four.start(
        four.ranks, lambda rank: rank.voted(hit=knows if rank.rank == ROOT else lambda point: None)
    )
    assert knows.reached.wait(WITHIN_S)
    for rank in four.ranks:
        rank.collect(2)
    knows.go.set()
    assert not votes[ROOT].result(WITHIN_S).failed
    assert [outcome(vote) for vote in votes[1:]] == [Revoked] * 3
    assert [r.phase for r in four.ranks] == [Phase.APPLYING] + [Phase.HOLDING] * 3
    assert [r.seat.answer().committed for r in four.ranks] == [1, 0, 0, 0]


def test_a_result_after_the_revocation_changes_nothing(four: World) -> None:
    knows = At("result")
    votes = four.start(
        four.ranks, lambda rank: rank.voted(hit=knows if rank.rank == ROOT else lambda point: None)
    )
    assert knows.reached.wait(WITHIN_S)
    four.ranks[LEAF].collect(2)
    assert outcome(votes[LEAF]) is Revoked
    knows.go.set()
    assert [outcome(votes[r]) for r in (ROOT, INNER, LOW)] == [votes[ROOT].result()] * 3
    assert four.ranks[LEAF].phase is Phase.HOLDING
    with pytest.raises(Revoked):
        four.ranks[LEAF].voted()
    assert four.ranks[LEAF].phase is Phase.HOLDING


def test_a_rank_whose_generation_ended_before_its_vote_does_not_vote(four: World) -> None:
    four.ranks[LOW].collect(2)
    with pytest.raises(Revoked):
        four.ranks[LOW].voted()
    assert four.ranks[LOW].phase is Phase.POISONED


def test_extras_of_the_step_after_prove_the_commit_to_who_waits_for_the_result(
    four: World,
) -> None:
    knows = At("result")
    votes = four.start(
        four.ranks, lambda rank: rank.voted(hit=knows if rank.rank == ROOT else lambda point: None)
    )
    leaf = four.ranks[LEAF]
    assert knows.reached.wait(WITHIN_S)
    assert leaf.reaches(Phase.VOTED)
    # XKNOW: as INNER sends them at the end of step 1, whose extras LEAF keeps.
    link = four.ranks[INNER].links.control.link(CHANNEL, LEAF)
    link.queue(Kind.EXTRAS, 2, bytes([0]) + pack({"at": b"2"}))
    link.flush(1)
    assert leaf.reaches(Phase.APPLYING)
    leaf.collect(2)
    assert votes[LEAF].result(WITHIN_S) == Ballot()
    assert leaf.phase is Phase.APPLYING
    assert leaf.seat.answer().committed == 1
    knows.go.set()


def test_a_step_that_was_cut_off_is_voted_on_again_in_the_next_generation(four: World) -> None:
    knows = At("vote")
    votes = four.start(
        four.ranks,
        lambda rank: rank.voted(
            Ballot(numbers={"loss": (8.0, 1)}), knows if rank.rank == ROOT else lambda point: None
        ),
    )
    assert knows.reached.wait(WITHIN_S)
    for rank in four.ranks:
        rank.collect(2)
    knows.go.set()
    assert [outcome(vote) for vote in votes] == [Revoked] * 4
    four.begin(2, target=0)
    assert all(rank.keeps(b, 1) is None for rank in four.ranks for b in rank.vote.neighbours)
    totals = four.all(lambda rank: rank.voted(Ballot(numbers={"loss": (1.0, 1)})))
    assert [total.averages for total in totals] == [{"loss": 1.0}] * 4


@pytest.mark.parametrize("fails", [ROOT, LOW])
def test_a_step_that_was_aborted_is_voted_on_again_in_the_next_generation(
    four: World, fails: int
) -> None:
    votes = four.start([r for r in four.ranks if r.rank != fails], Rank.voted)
    four.ranks[fails].vote.abort(0)
    assert all(vote.result(WITHIN_S).failed for vote in votes)
    for rank in four.ranks:
        rank.collect(2)
    four.begin(2, target=0)
    assert not any(total.failed for total in four.all(Rank.voted))


# ---- extras at the buddies


def test_rebuddy_gives_each_buddy_all_extras(four: World) -> None:
    for rank in four.ranks:
        assert [four.ranks[b].keeps(rank.rank, 0) for b in rank.vote.buddies] == [rank.parts()] * 2


def test_a_rank_without_its_neighbours_extras_says_what_it_waits_for(four: World) -> None:
    with pytest.raises(TimeoutError, match="extras of the neighbours and acknowledgements"):
        four.ranks[ROOT].vote.rebuddy(0, four.ranks[ROOT].parts(), 0.02)


def test_a_rank_whose_buddies_do_not_acknowledge_does_not_begin(tmp_path: Path) -> None:
    with world(tmp_path, 2) as two:
        link = two.ranks[1].links.control.link(CHANNEL, 0)
        link.queue(Kind.EXTRAS, 0, bytes([FULL]) + pack(two.ranks[1].parts()))
        link.flush(1)
        with pytest.raises(TimeoutError, match="acknowledgements of the buddies"):
            two.ranks[0].vote.rebuddy(0, two.ranks[0].parts(), 0.05)


def test_an_older_acknowledgement_does_not_count_for_late_extras(tmp_path: Path) -> None:
    with world(tmp_path, 2) as two:
        late, buddy = two.ranks
        late.late = 7
        future = two.pool.submit(late.vote.late_extras, 0, late.parts())
        link = buddy.links.control.link(CHANNEL, 0)
        assert select.select([link], [], [], WITHIN_S)[0]
        late.collect(2)  # the buddy has not looked at its link yet
        assert isinstance(future.exception(WITHIN_S), Revoked)


def test_late_extras_are_acknowledged_before_the_step_goes_on(four: World) -> None:
    late = four.ranks[LOW]

    def train(rank: Rank) -> Callable[[], tuple[str, ...]]:
        rank.voted()
        rank.close_block()
        changed: tuple[str, ...] = ()
        if rank is late:
            assert rank.vote.late_extras(1, rank.parts()) == ()
            rank.late = 7
            changed = rank.vote.late_extras(1, rank.parts())
            for buddy in rank.vote.buddies:
                assert four.ranks[buddy].keeps(LOW, 1) == rank.parts()
        rank.voted()
        return lambda: changed

    assert [done() for done in four.all(train)] == [(), (), (), ("at",)]


def test_late_extras_that_did_not_change_cost_nothing(four: World) -> None:
    rank = four.ranks[LOW]  # nobody else answers meanwhile
    assert rank.vote.late_extras(0, rank.parts()) == ()


def test_only_what_changed_travels_after_the_first_extras(
    four: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[bool, set[str]]] = []
    put = type(four.ranks[0].seat.shelf).put

    def spy(shelf: object, rank: int, version: int, parts: dict[str, bytes], *, full: bool) -> None:
        sent.append((full, set(parts)))
        put(shelf, rank, version, parts, full=full)  # type: ignore[arg-type]

    monkeypatch.setattr(type(four.ranks[0].seat.shelf), "put", spy)
    four.all(Rank.voted)
    assert sent == [(False, {"at"})] * 8
