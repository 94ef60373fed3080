"""bench/warmup.py: what a recording left behind is read correctly from the lines of the ranks."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
FOLDERS = tuple(str(BENCH / name) for name in ("moves", "rivals"))


@pytest.fixture
def load() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of the bench, as the bench does; none of them stays."""
    before, path = set(sys.modules), list(sys.path)
    sys.path[:0] = [*FOLDERS, str(BENCH)]
    try:
        yield importlib.import_module
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCH)):
                del sys.modules[name]


@pytest.fixture
def warmups(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("warmups")


@pytest.fixture
def warmup(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("warmup")


def trained(steps: int, cpu_s: tuple[float, ...]) -> list[Any]:
    """Each rank takes that much CPU time for a step, and has had some before."""
    line = sys.modules["ledger"].Line
    return [
        line(float(step), rank, 10 + rank, "commit", step, 4, 7.0 * rank + step * each)
        for step in range(steps)
        for rank, each in enumerate(cpu_s)
    ]


def test_a_share_compares_the_two_ranks_of_one_class_in_whole_windows(warmups: ModuleType) -> None:
    lines = trained(3 * warmups.WINDOW, (9.0, 0.2, 0.3, 5.0))
    assert warmups.shares(lines) == pytest.approx([1.5, 1.5])
    assert warmups.shares(lines, since_step=2 * warmups.WINDOW) == []


def test_what_is_between_two_places_goes_out_of_a_crossed_comparison(warmups: ModuleType) -> None:
    place, recording = 1.3, 1.1
    second, first = place * recording, place / recording
    assert warmups.crossed([second] * 3, [first] * 3) == pytest.approx([recording] * 3)
    assert warmups.crossed([second], [second]) == [1.0]


def test_equals_are_two_jobs_in_which_the_same_rank_recorded(warmup: ModuleType) -> None:
    found = warmup.of_recordings({"second": [[1.21], [1.21]], "first": [[1.0], [1.0]]})
    assert found["recorded"].value == pytest.approx(1.1)
    assert found["equals"].value == 1.0
    once = warmup.of_recordings({"second": [[1.21]], "first": [[1.0]]})
    assert list(once) == ["recorded"]
    assert warmup.of_recordings({"second": [[1.21]], "first": []}) == {}


def test_jobs_that_differ_make_the_interval_wide_however_alike_their_windows_are(
    warmup: ModuleType,
) -> None:
    found = warmup.of_recordings({"second": [[1.44] * 50, [1.0] * 50], "first": [[1.0] * 50] * 2})
    assert (found["recorded"].low, found["recorded"].high) == pytest.approx((1.0, 1.2))


def test_a_class_that_took_long_is_seen_in_the_medians_of_warm_ups(
    warmup: ModuleType, warmups: ModuleType
) -> None:
    of = [warmups.WarmUp(0.0, 3.0, 4.0 + n, 1.0, {"first": 1.0, "last": 2.0 + n}) for n in range(3)]
    found = warmup.of_warm_ups(of)
    assert found["until_warm"].value == 5.0
    assert found["classes"] == {"first": 1.0, "last": 3.0}


def test_a_step_that_takes_longer_beside_a_warm_up_is_a_limit_not_reached(
    warmup: ModuleType,
) -> None:
    stretch, beside = sys.modules["stretches"].Stretch, sys.modules["findings"].Beside
    calm = stretch(steps=10, wall_s=1.0, cpu_s=1.0)
    slow = stretch(steps=10, wall_s=1.02, cpu_s=1.1)
    measured = warmup.Measured(turns=[beside(slow, calm, calm, calm)] * 3)
    cpu, wall = warmup.verdicts(warmup.of(measured)).splitlines()
    assert cpu.startswith("NOT REACHED: while a standby warms up a step takes 1.100")
    assert wall.startswith("reached: while a standby warms up a step takes 1.020")


def test_what_was_not_measured_has_no_table_and_no_verdict(warmup: ModuleType) -> None:
    results = warmup.of(warmup.Measured())
    assert (warmup.tables(results), warmup.verdicts(results)) == ("", "")
