"""Neighbours, and what a new assignment does to them."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmover.runtime.topology import (
    Delta,
    Edge,
    Place,
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
    for rank, chosen in enumerate(buddies(machines)):
        assert len(chosen) == len(set(chosen)) == min(2, len(machines) - 1)
        assert rank not in chosen
        others = set(machines) - {machines[rank]}
        if len(others) >= 2:
            assert len({machines[c] for c in chosen} - {machines[rank]}) == 2
        elif others and chosen:
            assert machines[chosen[0]] in others


@given(st.integers(1, 6), st.integers(1, 8))
def test_on_machines_of_one_size_all_ranks_hold_equally_much(count: int, per_machine: int) -> None:
    chosen = buddies([f"m{i}" for i in range(count) for _ in range(per_machine)])
    held = Counter(buddy for each in chosen for buddy in each)
    expected = min(2, count * per_machine - 1)
    assert [held[rank] for rank in range(len(chosen))] == [expected] * len(chosen)


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


@dataclass(frozen=True)
class Grid:
    """A job whose axes have these sizes, on machines of so many ranks."""

    axes: tuple[int, ...]
    per_machine: int

    @property
    def size(self) -> int:
        return prod(self.axes)

    def groups(self, axis: int) -> Iterable[Sequence[int]]:
        """The groups along an axis, each in rank order."""
        inner = prod(self.axes[axis + 1 :])
        span = inner * self.axes[axis]
        for outer, at in product(range(0, self.size, span), range(inner)):
            yield range(outer + at, outer + at + span, inner)

    @cached_property
    def machines(self) -> list[str]:
        return [f"m{rank // self.per_machine}" for rank in range(self.size)]

    @cached_property
    def channels(self) -> dict[str, frozenset[Edge]]:
        """Of the whole job: WORLD, every group of every axis, and control."""
        made = {"world": ring_edges(range(self.size)), "control": control_edges(self.machines)}
        for axis in range(len(self.axes)):
            for group in self.groups(axis):
                made[f"{axis}:{group[0]}"] = ring_edges(group)
        return made

    @cached_property
    def degrees(self) -> list[int]:
        """Links of every rank, by counting what it belongs to."""
        near = [set(tree_children(rank, self.size)) for rank in range(self.size)]
        for rank, chosen in enumerate(buddies(self.machines)):
            near[rank] |= set(chosen)
        for rank in range(self.size):
            for other in near[rank]:
                near[other].add(rank)
        rings = sum(min(size - 1, 2) for size in (self.size, *self.axes))
        return [rings + len(others) for others in near]

    def deltas(self, joiners: Collection[int], ranks: Iterable[int]) -> dict[int, Delta]:
        """What `ranks` do when the holders of `joiners` are replaced."""
        old = {rank: f"w{rank}" for rank in range(self.size)}
        new = old | {rank: f"x{rank}" for rank in joiners}
        return {r: delta(self.channels, r, None if r in joiners else old, new) for r in ranks}


def assert_links_move_with_the_joiners_alone(
    grid: Grid, joiners: Collection[int], ranks: Iterable[int]
) -> None:
    """A joiner opens its degree; everybody else what leads to one, and nothing more."""
    deltas = grid.deltas(joiners, {*joiners, *ranks})
    for joiner in joiners:
        assert len(deltas[joiner].open) == grid.degrees[joiner]
        assert deltas[joiner].close == ()
    expected: dict[int, list[Place]] = {}
    for joiner in joiners:
        for channel, peer in deltas[joiner].open:
            expected.setdefault(peer, []).append((channel, joiner))
    for rank in deltas.keys() - set(joiners):
        opened = tuple(sorted(expected.get(rank, [])))
        assert deltas[rank].open == deltas[rank].close == opened
        assert len(deltas[rank].keep) == grid.degrees[rank] - len(opened)
        assert not {peer for _, peer in deltas[rank].keep} & set(joiners)
    for joiner in joiners:  # of two joiners each opens its end
        for channel, peer in deltas[joiner].open:
            assert peer not in joiners or (channel, joiner) in deltas[peer].open


@st.composite
def grids(draw: st.DrawFn) -> tuple[Grid, set[int]]:
    """Up to five axes, and the ranks that are replaced: any, or those of one machine."""
    axes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5).filter(lambda a: prod(a) <= 64))
    grid = Grid(tuple(axes), draw(st.integers(1, 8)))
    if draw(st.booleans()):
        gone = draw(st.sampled_from(sorted(set(grid.machines))))
        return grid, {rank for rank, machine in enumerate(grid.machines) if machine == gone}
    return grid, draw(st.sets(st.integers(0, grid.size - 1), min_size=1, max_size=8))


@settings(max_examples=25, deadline=None)
@given(grids())
def test_in_every_layout_only_links_to_joiners_move(world: tuple[Grid, set[int]]) -> None:
    grid, joiners = world
    assert_links_move_with_the_joiners_alone(grid, joiners, range(grid.size))


LARGE = ((4096,), (64, 64), (8, 64, 8), (8, 4, 8, 2, 8))


@pytest.mark.parametrize("axes", LARGE, ids=str)
def test_with_4096_ranks_a_machine_is_replaced_by_links_to_its_eight_ranks_alone(
    axes: tuple[int, ...],
) -> None:
    grid = Grid(axes, per_machine=8)
    joiners = range(2048, 2056)
    beside = {peer for change in grid.deltas(joiners, joiners).values() for _, peer in change.open}
    others = set(range(0, 4096, 400)) - beside - set(joiners)
    assert_links_move_with_the_joiners_alone(grid, joiners, [*sorted(beside)[::8], *others])
    quiet = grid.deltas(joiners, others)
    assert len(others) > 5
    assert all(change.open == change.close == () for change in quiet.values())


def test_with_4096_ranks_links_and_their_change_are_computed_at_once() -> None:
    grid = Grid((8, 4, 8, 2, 8), per_machine=8)
    assert cpu_s(lambda: control_edges(grid.machines)) < 0.5
    assert grid.channels
    old = {rank: f"w{rank}" for rank in range(grid.size)}
    new = old | {2048: "x"}
    assert cpu_s(lambda: delta(grid.channels, 2049, old, new)) < 0.05


def cpu_s(call: Callable[[], object]) -> float:
    """CPU seconds of this thread, the least of three."""
    took = []
    for _ in range(3):
        began = time.thread_time()
        call()
        took.append(time.thread_time() - began)
    return min(took)
