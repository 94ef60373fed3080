"""Neighbours, and what a new assignment does to them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from trainmover.runtime.topology import (
    Edge,
    buddies,
    control_edges,
    delta,
    dialer,
    peers,
    ring_edges,
    tree_children,
    tree_edges,
    tree_parent,
)

SIZES = st.integers(1, 12)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[str, frozenset[Edge]], int, set[int]]:
    """Channels over a world of some size, and the ranks that are replaced."""
    size = draw(SIZES)
    members = st.sets(st.integers(0, size - 1), min_size=1).map(sorted)
    channels = {f"g{i}": ring_edges(draw(members)) for i in range(draw(st.integers(1, 4)))}
    machines = [f"m{draw(st.integers(0, 3))}" for _ in range(size)]
    channels["control"] = control_edges(machines)
    return channels, size, draw(st.sets(st.integers(0, size - 1)))


def test_a_ring_of_two_shares_one_link_and_of_one_has_none() -> None:
    assert ring_edges([4]) == frozenset()
    assert ring_edges([4, 2]) == {(2, 4)}
    assert ring_edges([0, 2, 5]) == {(0, 2), (2, 5), (0, 5)}


@given(SIZES)
def test_the_vote_tree_reaches_every_rank_once(size: int) -> None:
    edges = tree_edges(size)
    assert len(edges) == size - 1
    for rank in range(size):
        parent = tree_parent(rank)
        expected = {*tree_children(rank, size), *([] if parent is None else [parent])}
        assert set(peers(edges, rank)) == expected


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=16))
def test_buddies_are_two_others_on_other_machines_where_there_are_so_many(
    machines: list[str],
) -> None:
    for rank in range(len(machines)):
        chosen = buddies(rank, machines)
        assert len(chosen) == len(set(chosen)) == min(2, len(machines) - 1)
        assert rank not in chosen
        others = set(machines) - {machines[rank]}
        if len(others) >= 2:
            assert len({machines[c] for c in chosen} - {machines[rank]}) == 2
        elif others and chosen:
            assert machines[chosen[0]] in others


@settings(max_examples=25)
@given(worlds())
def test_both_ends_of_a_link_agree_on_what_happens_to_it_and_who_dials(
    world: tuple[dict[str, frozenset[Edge]], int, set[int]],
) -> None:
    channels, size, joiners = world
    old = {rank: f"w{rank}" for rank in range(size)}
    new = old | {rank: f"x{rank}" for rank in joiners}
    deltas = [delta(channels, r, None if r in joiners else old, new) for r in range(size)]
    for rank, change in enumerate(deltas):
        for channel, peer in change.open:
            assert (channel, rank) in deltas[peer].open
            assert dialer(rank, peer, joiners) == dialer(peer, rank, joiners)
        for channel, peer in change.keep:
            assert (channel, rank) in deltas[peer].keep


@settings(max_examples=25)
@given(worlds())
def test_a_joiner_opens_its_degree_and_an_undisturbed_stayer_nothing(
    world: tuple[dict[str, frozenset[Edge]], int, set[int]],
) -> None:
    channels, size, joiners = world
    old = {rank: f"w{rank}" for rank in range(size)}
    new = old | {rank: f"x{rank}" for rank in joiners}
    for rank in range(size):
        degree = sum(len(peers(edges, rank)) for edges in channels.values())
        change = delta(channels, rank, None if rank in joiners else old, new)
        assert len(change.open) + len(change.keep) == degree
        if rank in joiners:
            assert len(change.open) == degree
        elif not any(peer in joiners for edges in channels.values() for peer in peers(edges, rank)):
            assert change.open == change.close == ()


def test_the_joiner_dials_a_stayer_and_the_lower_of_two_joiners_dials() -> None:
    assert dialer(1, 2, {2}) == 2
    assert dialer(1, 2, {1, 2}) == 1
    assert dialer(2, 1, ()) == 1
