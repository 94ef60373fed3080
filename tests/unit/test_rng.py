"""The random state of a rank comes back exactly and is cheap to read."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from trainmover.runtime import rng


def draws() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand(1).item(),
    ]


@pytest.mark.parametrize("normals", [0, 1, 2, 3])
def test_every_generator_continues_where_it_was(normals: int) -> None:
    for _ in range(normals):  # each second one is cached inside the generator
        np.random.randn()
        random.gauss(0, 1)
    state = rng.capture()
    expected = draws()
    rng.seed_all(5)
    rng.restore(state)
    assert draws() == expected
    rng.restore(rng.from_parts(rng.to_parts(state)))
    assert draws() == expected


def in_full() -> list[Any]:
    """What the generators themselves say."""
    state: Any = np.random.get_state()
    _, key, *rest = state
    return [random.getstate(), key.tolist(), rest, torch.get_rng_state().tolist()]


def without_its_normal() -> None:
    state: Any = np.random.get_state()
    np.random.set_state((*state[:3], 1 - state[3], 0.25))


CHANGES: list[Callable[[], object]] = [
    random.random,
    lambda: random.gauss(0, 1),
    lambda: random.seed(3),
    lambda: random.setstate((*random.getstate()[:2], 0.5)),
    np.random.rand,
    np.random.randn,
    lambda: np.random.binomial(10, 0.5),
    lambda: np.random.seed(3),
    without_its_normal,
    lambda: torch.rand(1),
    lambda: torch.randn(1),
    lambda: torch.default_generator.manual_seed(3),
]


@pytest.mark.parametrize("order", range(12))
def test_a_changed_generator_is_always_noticed(order: int) -> None:
    for change in random.Random(order).choices(CHANGES, k=12):
        before, said = in_full(), rng.capture()
        change()
        after, state = in_full(), rng.capture()
        assert (state == said) == (after == before)
        rng.seed_all(5)
        rng.restore(state)
        assert in_full() == after
        assert rng.capture() == state


def test_a_generator_that_rests_gives_the_same_object_again() -> None:
    before = rng.capture()
    torch.rand(1)
    after = rng.capture()
    assert after.python is before.python
    assert after.numpy is before.numpy
    assert after.cpu is not before.cpu
    assert rng.capture() is after


def test_an_interpreter_whose_generator_cannot_be_read_in_memory_is_asked_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rng._python, "_in_memory", False)
    monkeypatch.setattr(rng._python, "_seen", b"")
    before = rng.capture()
    assert rng.capture() is before
    random.random()
    assert rng.capture().python != before.python


def test_the_python_generator_is_read_in_memory_here() -> None:
    assert rng._python._in_memory


@pytest.fixture
def another_numpy() -> Iterator[Callable[[np.random.BitGenerator], None]]:
    first = np.random.get_bit_generator()  # type: ignore[attr-defined]
    yield np.random.set_bit_generator  # type: ignore[attr-defined]
    np.random.set_bit_generator(first)  # type: ignore[attr-defined]


def test_another_numpy_generator_with_the_state_of_another_seed_is_noticed(
    another_numpy: Callable[[np.random.BitGenerator], None],
) -> None:
    before = rng.capture()
    another_numpy(np.random.MT19937(3))
    drawn = rng.capture()
    assert drawn.numpy != before.numpy
    expected = np.random.rand()
    assert rng.capture().numpy != drawn.numpy
    rng.restore(drawn)
    assert np.random.rand() == expected


def test_a_numpy_generator_that_cannot_move_is_refused(
    another_numpy: Callable[[np.random.BitGenerator], None],
) -> None:
    another_numpy(np.random.PCG64(3))
    with pytest.raises(TypeError, match="PCG64"):
        rng.capture()


def test_a_cached_normal_that_is_used_up_changes_the_state() -> None:
    np.random.seed(0)
    np.random.randn()
    before = rng.to_parts(rng.capture())
    np.random.randn()
    assert rng.to_parts(rng.capture())["numpy"] != before["numpy"]


def test_only_the_generator_that_was_used_changes_its_part() -> None:
    before = rng.to_parts(rng.capture())
    torch.rand(1)
    after = rng.to_parts(rng.capture())
    assert {name for name in after if after[name] != before[name]} == {"cpu"}


def test_a_stream_continues_by_itself_and_leaves_the_rank_alone() -> None:
    state = rng.capture()
    stream = rng.Stream(7)
    with stream:
        first = draws()
    with stream:
        second = draws()
    assert rng.to_parts(rng.capture()) == rng.to_parts(state)
    with rng.Stream(7):
        assert draws() + draws() == first + second


def test_seeds_depend_on_every_part_of_their_key() -> None:
    seeds = {rng.seed_from(s, e, k) for s in range(3) for e in range(3) for k in ("order", 0, 1)}
    assert len(seeds) == 27


def test_parts_that_are_missing_or_damaged_are_value_errors() -> None:
    parts = rng.to_parts(rng.capture())
    for damaged in ({}, {**parts, "python": b"x"}, {**parts, "numpy": b""}):
        with pytest.raises(ValueError, match="random state"):
            rng.from_parts(damaged)
