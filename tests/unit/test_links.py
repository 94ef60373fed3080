"""Two meshes with a fence each: what breaks one does not silence the other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.linked_ranks import WITHIN_S, Rank, World, assignment, environment, switch, world

from trainmover.runtime.endpoint import Connection, Endpoint
from trainmover.runtime.fence import Revoked
from trainmover.runtime.link import LinkBroken
from trainmover.runtime.links import Links
from trainmover.runtime.topology import ring_edges
from trainmover.schemas.commands import Drop, Prepare

RING = "0-1#0"


@pytest.fixture
def two(tmp_path: Path) -> Iterator[World]:
    """Two ranks with one link for data and one for votes."""
    with world(tmp_path, 2) as made:
        for rank in made.ranks:
            rank.links.data.register(RING, ring_edges((0, 1)))
            rank.links.open_data(1)
        made.all(lambda rank: rank.links.data.connect(RING, WITHIN_S))
        yield made


def test_a_broken_data_link_is_seen_at_both_ends_and_votes_go_on(two: World) -> None:
    two.ranks[0].links.cut_one()
    for rank in two.ranks:
        with pytest.raises(LinkBroken):
            rank.links.data.link(RING, 1 - rank.rank).header()
        rank.links.data_fence.revoke(1, "the link broke")
    assert not any(total.failed for total in two.all(Rank.voted))


def test_a_plan_ends_votes_and_data(two: World) -> None:
    links = two.ranks[0].links
    links.end(2)
    for fence in (links.data_fence, links.control_fence):
        with pytest.raises(Revoked, match="generation 2 was planned"):
            fence.check(1)


def test_a_late_order_does_not_end_the_generation_that_it_led_to(two: World) -> None:
    links = two.ranks[0].links
    links.end(1)
    links.data_fence.check(1)
    links.control_fence.check(1)


def test_a_switch_lets_votes_through_and_data_only_after_the_resume(two: World) -> None:
    command = switch(2, two.members)

    def move(rank: Rank) -> tuple[int, int, int]:
        rank.links.end(2)
        return rank.links.switch(command, rank.rank, WITHIN_S)

    assert two.all(move) == [(0, 0, 2)] * 2
    for rank in two.ranks:
        rank.links.control_fence.check(2)
        assert rank.links.data_fence.revoked
        rank.links.open_data(2)
        rank.links.data_fence.check(2)


def test_a_new_role_starts_without_the_links_and_channels_of_the_last(two: World) -> None:
    links = two.ranks[0].links
    assert list(links.data.channels) == [RING]
    links.renew(("m0", "m1"))
    assert list(links.data.channels) == []
    assert list(links.control.channels) == ["control"]
    assert links.control.links("control") == {}
    with pytest.raises(LinkBroken, match="the peer closed"):
        two.ranks[1].links.data.link(RING, 0).header()


def test_a_switch_to_a_peer_that_is_gone_says_whom_it_could_not_reach(tmp_path: Path) -> None:
    links = [Links(environment(tmp_path, rank, 2)) for rank in range(2)]
    members = assignment(links)
    links[1].close()
    links[0].renew(("m0", "m1"))
    with pytest.raises(ConnectionError, match="expected worker w1 to answer"):
        links[0].switch(switch(1, members), 0, 0.5)
    assert links[0].control_fence.revoked
    links[0].close()


# ---- links that a joiner opens ahead


class Joiner:
    """Is to take rank 1 of `two` in generation 2, or later."""

    def __init__(self, two: World, folder: Path) -> None:
        self.links = Links(environment(folder, 2, 3))
        self.links.renew(("m0", "m1"))
        self.links.data.register(RING, ring_edges((0, 1)))
        (taken,) = assignment([self.links])
        self.stayer = two.ranks[0].links
        self.members = (two.members[0], taken.model_copy(update={"rank": 1}))

    def prepare(self, generation: int = 2) -> None:
        command = switch(generation, self.members)
        prepare = Prepare(
            generation=generation,
            layout=command.layout,
            members=self.members,
            placement=command.placement,
            joiners=(1,),
        )
        self.links.prepare(prepare, 1, WITHIN_S)

    def drop(self, generation: int, *links: Links) -> None:
        for each in links:
            each.drop(Drop(generation=generation, reason="test"))

    def switch(self, two: World, generation: int = 2) -> list[tuple[int, int, int]]:
        """Of the stayer and the joiner: links opened, closed, kept."""
        command = switch(generation, self.members).model_copy(update={"joiners": (1,)})
        self.stayer.end(generation)
        both = ((self.stayer, 0), (self.links, 1))
        started = [two.pool.submit(each.switch, command, r, WITHIN_S) for each, r in both]
        return [future.result(WITHIN_S) for future in started]


@pytest.fixture
def joiner(two: World, tmp_path: Path) -> Iterator[Joiner]:
    made = Joiner(two, tmp_path)
    yield made
    made.links.close()
    made.links.data_fence.close()
    made.links.control_fence.close()
    made.links.cancellation.close()


@pytest.fixture
def dialed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """Worker, channel and generation of every link that is dialed from now on."""
    made: list[tuple[str, str, int]] = []
    dial = Endpoint.dial

    def counted(
        self: Endpoint,
        addresses: tuple[str, ...],
        worker: str,
        channel: str,
        generation: int,
        *rest: float,
        **more: Any,
    ) -> Connection:
        made.append((worker, channel, generation))
        return dial(self, addresses, worker, channel, generation, *rest, **more)

    monkeypatch.setattr(Endpoint, "dial", counted)
    return made


BOTH = [("w0", "control", 2), ("w0", RING, 2)]


def test_links_are_opened_ahead_while_votes_go_on_and_the_switch_dials_none(
    two: World, joiner: Joiner, dialed: list[tuple[str, str, int]]
) -> None:
    before = two.ranks[0].links.data.link(RING, 1)
    joiner.prepare()
    assert dialed == BOTH
    assert not any(total.failed for total in two.all(Rank.voted))
    assert two.ranks[0].links.data.link(RING, 1) is before
    assert joiner.switch(two) == [(2, 2, 0), (2, 0, 0)]
    assert dialed == BOTH
    link = joiner.stayer.data.link(RING, 1)
    assert (link.peer_worker, link.fault) == ("w2", None)


def test_what_is_asked_again_dials_only_what_is_missing(
    joiner: Joiner, dialed: list[tuple[str, str, int]]
) -> None:
    joiner.prepare()
    joiner.prepare()
    assert dialed == BOTH


def test_a_newer_plan_has_links_of_its_own(
    two: World, joiner: Joiner, dialed: list[tuple[str, str, int]]
) -> None:
    joiner.prepare(2)
    joiner.prepare(3)
    assert [generation for *_, generation in dialed] == [2, 2, 3, 3]
    assert joiner.switch(two, 3) == [(2, 2, 0), (2, 0, 0)]
    assert len(dialed) == 4


def test_what_was_opened_for_a_dropped_plan_is_closed_at_both_ends_and_nothing_else(
    two: World, joiner: Joiner, dialed: list[tuple[str, str, int]]
) -> None:
    joiner.prepare(2)
    door = joiner.stayer.endpoint
    with door._arrived:  # the dialer is answered a moment before
        assert door._arrived.wait_for(lambda: len(door._pending) == len(BOTH), WITHIN_S)
    joiner.drop(2, joiner.stayer, joiner.links)
    for worker, channel, generation in dialed:
        assert worker == "w0"
        assert door.take("w2", channel, generation) is None
    assert not any(total.failed for total in two.all(Rank.voted))
    joiner.prepare(2)
    assert dialed == [*BOTH, *BOTH]


def test_the_drop_of_another_plan_leaves_links_alone(
    two: World, joiner: Joiner, dialed: list[tuple[str, str, int]]
) -> None:
    joiner.prepare(3)
    joiner.drop(2, joiner.stayer, joiner.links)
    assert joiner.switch(two, 3) == [(2, 2, 0), (2, 0, 0)]
    assert len(dialed) == 2


def test_a_neighbour_that_cannot_be_reached_is_named_and_nothing_else_changes(
    two: World, joiner: Joiner
) -> None:
    gone = joiner.members[0].model_copy(
        update={"worker": "gone", "addresses": ("tcp:127.0.0.1:1",)}
    )
    joiner.members = (gone, joiner.members[1])
    with pytest.raises(ConnectionError, match="expected worker gone to answer"):
        joiner.prepare()
    assert not any(total.failed for total in two.all(Rank.voted))
