"""Who can be whose donor, and what of a rank nobody else holds."""

import pytest

from trainmover.schemas.layout import Layout
from trainmover.schemas.shards import holding, in_words, lost, replicas, sources

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


def test_objects_whose_holders_differ_come_from_different_ranks() -> None:
    shards = said(HSDP, model=("dp_shard",), average=("dp_replicate",))
    assert sources(HSDP, shards, 1, {0, 2, 3}) == (
        ((LOOP,), (0, 2, 3)),
        (("model",), (3,)),
        (("average",), (0,)),
    )
    assert lost(HSDP, shards, 1, {0, 2, 3}) == ()
    assert sources(HSDP, shards, 1, {0, 2}) == ()
    assert lost(HSDP, shards, 1, {0, 2}) == ("model",)
    assert holding(HSDP, shards, 1, ("model",)) == (1, 3)


def test_who_holds_everything_gives_everything() -> None:
    layout = Layout.parse("dp=3")
    shards = said(layout, model=())
    assert sources(layout, shards, 1, {0, 1, 2}) == (((), (0, 2)),)
    assert sources(layout, {}, 1, {2}) == (((), (2,)),)
    assert sources(layout, {}, 1, {1}) == sources(layout, shards, 1, ()) == ()
    assert holding(layout, {}, 1, ()) == (0, 1, 2)
