"""Who is linked with whom, and what a change of assignment does to the links: pure functions."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

Edge = tuple[int, int]
"""A link between two ranks, the lower one first."""
Place = tuple[str, int]
"""One end of a link as its owner sees it: (channel, peer rank)."""


@dataclass(frozen=True)
class Assignment:
    """Who holds which rank in a generation, as the holder of `rank` has it."""

    generation: int
    rank: int
    workers: Mapping[int, str]
    """Rank -> worker."""
    addresses: Mapping[str, tuple[str, ...]]
    """Worker -> where it listens."""
    joiners: Collection[int] = ()
    """Ranks whose worker is new in it, all of them in generation 1; the same at every member."""

    def dials(self, peer: int) -> bool:
        """Whether this rank dials `peer`, and not the other way round."""
        return dialer(self.rank, peer, self.joiners) == self.rank


@dataclass(frozen=True)
class Delta:
    """What one rank does with its links in a switchover; each sorted."""

    open: tuple[Place, ...]
    keep: tuple[Place, ...]
    close: tuple[Place, ...]


def ring_edges(ranks: Sequence[int]) -> frozenset[Edge]:
    """The ring through `ranks` in their order; two ranks share one link, one has none."""
    following = (*ranks[1:], *ranks[:1])
    return frozenset(_edge(a, b) for a, b in zip(ranks, following, strict=True) if a != b)


def tree_parent(rank: int) -> int | None:
    """Parent of `rank` in the binary vote tree; None for rank 0."""
    return (rank - 1) // 2 if rank else None


def tree_children(rank: int, world_size: int) -> tuple[int, ...]:
    """Children of `rank` in the binary vote tree of `world_size` ranks."""
    return tuple(child for child in (2 * rank + 1, 2 * rank + 2) if child < world_size)


def tree_edges(world_size: int) -> frozenset[Edge]:
    """The binary tree over ranks 0 .. world_size-1 that votes travel on."""
    return frozenset(((rank - 1) // 2, rank) for rank in range(1, world_size))


def buddies(machines: Sequence[str]) -> list[tuple[int, ...]]:
    """Of every rank the up to two ranks that hold its extras, in order of preference.

    `machines[r]` is the machine of rank r at the first placement: buddies are fixed for the job.
    They are the ranks at the same place of the next two machines, so that every rank of machines
    of one size holds those of two. Where there is one other machine the second is the next place
    there, and then come the next ranks of the own machine.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, machine in enumerate(machines):
        ranks_of.setdefault(machine, []).append(rank)
    groups = list(ranks_of.values())
    chosen: list[tuple[int, ...]] = [()] * len(machines)
    for at, own in enumerate(groups):
        following = [groups[(at + n) % len(groups)] for n in (1, 2) if n < len(groups)]
        for place, rank in enumerate(own):
            others = [ranks[(place + n) % len(ranks)] for n in (0, 1) for ranks in following]
            others += [own[(place + n) % len(own)] for n in (1, 2)]
            chosen[rank] = tuple(o for o in dict.fromkeys(others) if o != rank)[:2]
    return chosen


def control_edges(machines: Sequence[str]) -> frozenset[Edge]:
    """The control channel: the vote tree and every rank's buddies."""
    pairs = (_edge(rank, b) for rank, chosen in enumerate(buddies(machines)) for b in chosen)
    return tree_edges(len(machines)) | frozenset(pairs)


def peers(edges: Collection[Edge], rank: int) -> tuple[int, ...]:
    """The ranks that `rank` is linked with, ascending."""
    return tuple(sorted(b if a == rank else a for a, b in edges if rank in (a, b)))


def delta(
    channels: Mapping[str, frozenset[Edge]],
    rank: int,
    old: Mapping[int, str] | None,
    new: Mapping[int, str],
) -> Delta:
    """What the holder of `rank` opens, keeps and closes when assignment `old` becomes `new`.

    Assignments map rank to worker. `old` is None for a joiner, which has no links yet.
    """
    places = sorted((name, peer) for name, edges in channels.items() for peer in peers(edges, rank))
    if old is None:
        return Delta(open=tuple(places), keep=(), close=())
    changed = tuple(place for place in places if old[place[1]] != new[place[1]])
    kept = tuple(place for place in places if old[place[1]] == new[place[1]])
    return Delta(open=changed, keep=kept, close=changed)


def dialer(a: int, b: int, joiners: Collection[int]) -> int:
    """The rank of the two that dials: the joiner where there is exactly one, else the lower."""
    if (a in joiners) != (b in joiners):
        return a if a in joiners else b
    return min(a, b)


def _edge(a: int, b: int) -> Edge:
    return (a, b) if a < b else (b, a)
