"""Who holds the same as whom, object by object: from the shard keys that ranks say when ready."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

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


def lost(layout: Layout, shards: Shards, rank: int, holders: Iterable[int]) -> tuple[str, ...]:
    """Tracked names of `rank` that none of `holders` holds, in the order they were tracked; all of
    them where each has a holder, but no rank has all."""
    own, holders = _of_script(shards, rank), set(holders)
    if holders & set(replicas(layout, shards, rank)):
        return ()
    gone = [n for n in own if all(_of_script(shards, r).get(n) != own[n] for r in holders)]
    return tuple(gone or own)


def in_words(layout: Layout, shards: Shards, rank: int, names: Iterable[str]) -> str:
    """`dp_shard=1: model, optimizer`: the shard of these objects, or `whole model: ...`."""
    names = tuple(names)
    keys = "; ".join(dict.fromkeys(shards[rank][name] for name in names))
    key = keys or layout.shard(rank) or "whole model"
    return f"{key}: {', '.join(names)}" if names else key


def _of_script(shards: Shards, rank: int) -> dict[str, str]:
    said = shards.get(rank, {})
    return {name: key for name, key in said.items() if not name.startswith(INTERNAL)}
