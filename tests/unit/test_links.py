"""Two meshes with a fence each: what breaks one does not silence the other."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.linked_ranks import WITHIN_S, Rank, World, assignment, environment, switch, world

from trainmover.runtime.fence import Revoked
from trainmover.runtime.link import LinkBroken
from trainmover.runtime.links import Links
from trainmover.runtime.topology import ring_edges

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
            rank.links.data.link(RING, 1 - rank.rank).header(1)
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
        two.ranks[1].links.data.link(RING, 0).header(1)


def test_a_switch_to_a_peer_that_is_gone_says_whom_it_could_not_reach(tmp_path: Path) -> None:
    links = [Links(environment(tmp_path, rank, 2)) for rank in range(2)]
    members = assignment(links)
    links[1].close()
    links[0].renew(("m0", "m1"))
    with pytest.raises(ConnectionError, match="expected worker w1 to answer"):
        links[0].switch(switch(1, members), 0, 0.5)
    assert links[0].control_fence.revoked
    links[0].close()
