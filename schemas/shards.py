"""Who holds the same as whom, object by object: from the shard keys that ranks say when ready."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from trainmover.schemas.layout import Layout

Shards = Mapping[int, Mapping[str, str]]
"""Rank -> tracked name -> shard key, as in `rank.ready`; a rank may be missing."""

NOT_SAID: Shards = MappingProxyType({})
"""Every rank holds the shard that the layout gives it."""

NO_HOLDER = "no holder of this shard is left; in-memory snapshots are not in this version"

INTERNAL = "trainmover_"
"""Tracked names that begin so are none of the script's, and the same on all ranks."""


def replicas(layout: Layout, shards: Shards, rank: int) -> tuple[int, ...]:
    """Ranks that hold everything that `rank` holds, itself included; of a rank that has not said
    its keys, those of its shard in the layout."""
    own = _of_script(shards, rank)
    if not own:
        return layout.replicas(rank)
    ranks = range(layout.world_size)
    return tuple(r for r in ranks if r == rank or _of_script(shards, r) == own)


class Held(NamedTuple):
    """Objects of a rank, and the ranks of which each holds all of them."""

    names: tuple[str, ...]
    """Tracked names; empty: everything."""
    ranks: tuple[int, ...]


def sources(layout: Layout, shards: Shards, rank: int, among: Iterable[int]) -> tuple[Held, ...]:
    """Who of `among`, other than `rank`, can give its state: those that hold everything; else, of
    each object, those that hold it. Empty where something has no holder."""
    others = sorted(set(among) - {rank})
    if full := tuple(r for r in replicas(layout, shards, rank) if r in others):
        return (Held((), full),)
    if not _of_script(shards, rank):
        return ()
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, key in shards[rank].items():
        holds = {r: shards[r][name] for r in others if name in shards.get(r, {})}
        same = (r for r, its in holds.items() if its == key or name.startswith(INTERNAL))
        by_ranks.setdefault(tuple(same), []).append(name)
    if () in by_ranks:
        return ()
    return tuple(Held(tuple(names), ranks) for ranks, names in by_ranks.items())


def lost(layout: Layout, shards: Shards, rank: int, holders: Iterable[int]) -> tuple[str, ...]:
    """Tracked names of `rank` that none of `holders` holds, in the order they were tracked."""
    own, holders = _of_script(shards, rank), set(holders)
    return tuple(n for n in own if all(_of_script(shards, r).get(n) != own[n] for r in holders))


def holding(layout: Layout, shards: Shards, rank: int, names: Iterable[str]) -> tuple[int, ...]:
    """Ranks that hold one of these objects as `rank` does, itself included; of no names, those that
    hold everything."""
    own, names = _of_script(shards, rank), set(names)
    if not names:
        return replicas(layout, shards, rank)
    ranks = range(layout.world_size)
    return tuple(r for r in ranks if any(_of_script(shards, r).get(n) == own[n] for n in names))


def in_words(layout: Layout, shards: Shards, rank: int, names: Iterable[str]) -> str:
    """`dp_shard=1: model, optimizer`: the shard of these objects, or `whole model: ...`."""
    names = tuple(names)
    keys = "; ".join(dict.fromkeys(shards[rank][name] for name in names))
    key = keys or layout.shard(rank) or "whole model"
    return f"{key}: {', '.join(names)}" if names else key


def _of_script(shards: Shards, rank: int) -> dict[str, str]:
    said = shards.get(rank, {})
    return {name: key for name, key in said.items() if not name.startswith(INTERNAL)}
