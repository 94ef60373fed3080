"""Who can be whose donor, and what of a rank nobody else holds."""

import pytest

from trainmover.schemas.layout import Layout
from trainmover.schemas.shards import in_words, lost, replicas

HSDP = Layout.parse("dp_replicate=2,dp_shard=2")
LOOP = "trainmover_loop"


def said(layout: Layout, **over: tuple[str, ...]) -> dict[int, dict[str, str]]:
    """What every rank says of objects that differ along these axes."""
    return {
        rank: {LOOP: layout.shard(rank)}
        | {
            name: ",".join(f"{axis}={layout.coordinate(rank, axis)}" for axis in axes)
            for name, axes in over.items()
        }
        for rank in range(layout.world_size)
    }


def test_a_rank_that_has_said_nothing_has_the_replicas_of_the_layout() -> None:
    assert replicas(HSDP, {}, 1) == (1, 3)
    assert replicas(HSDP, {1: {LOOP: "dp_shard=1"}}, 1) == (1, 3)
    assert lost(HSDP, {}, 1, {0, 2}) == ()
    assert in_words(HSDP, {}, 1, ()) == "dp_shard=1"
    assert in_words(Layout.parse("dp=2"), {}, 1, ()) == "whole model"


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        ({"model": ("dp_shard",)}, (1, 3)),
        ({"model": ("dp_replicate",)}, (0, 1)),
        ({"model": ("dp_shard",), "optimizer": ("dp_replicate", "dp_shard")}, (1,)),
        ({"model": ("dp_shard",), "average": ("dp_replicate",)}, (1,)),
    ],
)
def test_a_replica_holds_everything_that_the_rank_tracks(
    over: dict[str, tuple[str, ...]], expected: tuple[int, ...]
) -> None:
    assert replicas(HSDP, said(HSDP, **over), 1) == expected


def test_what_the_runtime_tracks_is_the_same_everywhere() -> None:
    layout = Layout.parse("dp_shard=2,tp=2")
    assert replicas(layout, said(layout, model=("dp_shard",)), 1) == (0, 1)


def test_objects_that_nobody_else_holds_are_named() -> None:
    shards = said(HSDP, model=("dp_shard",), optimizer=("dp_replicate", "dp_shard"))
    assert lost(HSDP, shards, 1, {0, 2, 3}) == ("optimizer",)
    assert lost(HSDP, shards, 1, {0, 2}) == ("model", "optimizer")
    words = in_words(HSDP, shards, 1, ("model", "optimizer"))
    assert words == "dp_shard=1; dp_replicate=0,dp_shard=1: model, optimizer"


def test_all_objects_are_named_where_no_single_rank_holds_all() -> None:
    shards = said(HSDP, model=("dp_shard",), average=("dp_replicate",))
    assert lost(HSDP, shards, 1, {0, 2, 3}) == ("model", "average")
