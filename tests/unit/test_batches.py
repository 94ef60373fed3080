"""Positions of loaders: endless, repeatable after an undo, resumable at any index."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from trainmover.runtime import rng
from trainmover.runtime.batches import Batches


class Noisy(Dataset[torch.Tensor]):
    """Ten items, each with numbers of all three global generators."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(1).item() + np.random.rand() + random.random()
        return torch.tensor([index, noise], dtype=torch.float64)


class Lazy(Sampler[int]):
    """A user's sampler that draws at each index, not only at the start."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        for _ in range(10):
            yield random.randrange(10)


class Counting:
    """An iterable that knows its own state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 5:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def batches(source: Any) -> Batches:
    return Batches(source, seed=3, guard=lambda: None)


def take(data: Batches, n: int) -> list[list[Any]]:
    return [torch.as_tensor(next(data)).tolist() for _ in range(n)]


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(Noisy(), batch_size=3, shuffle=True),
    "own generator": lambda: DataLoader(
        Noisy(), batch_size=3, shuffle=True, drop_last=True, generator=torch.Generator()
    ),
    "unbatched": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    "lazy sampler": lambda: DataLoader(Noisy(), batch_size=4, sampler=Lazy()),
    "distributed": lambda: DataLoader(
        Noisy(), batch_size=2, sampler=DistributedSampler(Noisy(), num_replicas=2, rank=1)
    ),
    "state": Counting,
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("index", [0, 1, 3, 4, 5, 9])
def test_a_loader_resumes_at_any_index_bit_for_bit(name: str, index: int) -> None:
    rng.seed_all(0)
    data = batches(LOADERS[name])
    take(data, index)
    position, state = data.position(), rng.capture()
    expected = take(data, 6)

    rng.seed_all(1)
    joiner = batches(LOADERS[name])
    take(joiner, 2)  # as a shadow step does
    joiner.load_position(position)
    rng.restore(state)
    assert joiner.position() == position
    assert take(joiner, 6) == expected
    assert (joiner.epoch, joiner.position()) == (data.epoch, data.position())


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes_draw_the_same_wherever_the_loader_began(persistent: bool) -> None:
    def make() -> DataLoader[torch.Tensor]:
        return DataLoader(
            Noisy(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=persistent
        )

    rng.seed_all(0)
    data = batches(make)
    expected = take(data, 5)
    assert len({noise for batch in expected for _, noise in batch}) == 18
    rng.seed_all(1)
    joiner = batches(make)
    joiner.load_position(b"[0, 1, 10, 4, false]")
    assert take(joiner, 4) == expected[1:]


@pytest.mark.parametrize("name", LOADERS)
def test_an_undone_block_gets_its_batches_and_random_numbers_again(name: str) -> None:
    def block(data: Batches) -> tuple[Any, ...]:
        return take(data, 4), torch.rand(1).item(), random.random(), data.epoch, data.position()

    rng.seed_all(0)
    data = batches(LOADERS[name])
    take(data, 2)
    data.open()
    position, before = data.position(), rng.capture()
    first = block(data)
    data.undo()
    rng.restore(before)
    assert data.position() == position
    assert block(data) == first
    after = take(data, 3)

    rng.seed_all(0)
    undisturbed = batches(LOADERS[name])
    take(undisturbed, 2)
    assert block(undisturbed) == first
    assert take(undisturbed, 3) == after


def test_a_block_undone_halfway_hands_out_the_rest_in_order() -> None:
    data = batches(Counting)
    data.open()
    assert take(data, 3) == [1, 2, 3]  # type: ignore[comparison-overlap]
    data.undo()
    assert take(data, 1) == [1]  # type: ignore[comparison-overlap]
    position = data.position()
    data.undo()
    assert take(data, 4) == [1, 2, 3, 4]  # type: ignore[comparison-overlap]
    data.load_position(position)
    assert take(data, 1) == [2]  # type: ignore[comparison-overlap]


def test_making_an_iterator_and_shuffling_leave_the_generators_of_the_rank_alone() -> None:
    rng.seed_all(0)
    before = rng.to_parts(rng.capture())
    data = batches(DataLoader(TensorDataset(torch.arange(10.0)), shuffle=True))
    for _ in range(12):
        next(data)
    assert rng.to_parts(rng.capture()) == before


def test_each_epoch_has_its_own_order_and_is_told_to_the_sampler() -> None:
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(Noisy(), num_replicas=1, rank=0)
    data = batches(DataLoader(Noisy(), batch_size=10, sampler=sampler))
    first = [index for index, _ in take(data, 1)[0]]
    second = [index for index, _ in take(data, 1)[0]]
    assert (data.epoch, sampler.epoch) == (1, 1)
    assert sorted(first) == sorted(second)
    assert first != second


def test_what_has_no_position_is_refused_with_the_three_that_have() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1

    for source in (DataLoader(Stream()), [1, 2], lambda: 3):
        with pytest.raises(TypeError, match=r"StatefulDataLoader.*map-style.*state_dict"):
            batches(source)


def test_options_that_lose_the_position_are_refused() -> None:
    with pytest.raises(ValueError, match="in_order"):
        batches(DataLoader(Noisy(), num_workers=1, in_order=False))
    data = Noisy()
    data.set_epoch = lambda epoch: None  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="persistent_workers"):
        batches(DataLoader(data, num_workers=1, persistent_workers=True))


def test_a_joiner_with_another_batch_size_is_refused() -> None:
    position = batches(DataLoader(Noisy(), batch_size=2)).position()
    with pytest.raises(ValueError, match=r"batch_size.*\[10, 2, False\].*\[10, 5, False\]"):
        batches(DataLoader(Noisy(), batch_size=5)).load_position(position)


def test_an_empty_loader_is_an_error_and_not_an_endless_wait() -> None:
    with pytest.raises(ValueError, match="no batch in epoch"):
        next(batches(DataLoader(TensorDataset(torch.empty(0)))))


def test_the_guard_is_asked_at_every_batch() -> None:
    def guard() -> None:
        raise RuntimeError("outside a block")

    with pytest.raises(RuntimeError, match="outside a block"):
        next(Batches(Counting, seed=0, guard=guard))
