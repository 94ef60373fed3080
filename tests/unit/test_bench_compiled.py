"""bench/compiled: what a move cost is read correctly from the lines of the ranks."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "bench/compiled"
OLD, NEW = 11, 12


@pytest.fixture
def record() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("record")
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("record", None)


def committed(record: ModuleType, step: int, at_s: float, rank: int, pid: int, graphs: int) -> Any:
    return record.Line(at_s, pid, record.COMMIT, rank, step, seconds=0.2, cpu_s=0.1, graphs=graphs)


def lines(record: ModuleType) -> list[Any]:
    """Rank 1 loses OLD after step 4; NEW, with 2 graphs before that, does step 5 at 9 s."""
    found = [record.Line(0.5, NEW, record.SHADOW, graphs=2)]
    for step in range(5):
        found.append(committed(record, step, step + 0.0, 0, 10, 2))
        found.append(committed(record, step, step + 0.25, 1, OLD, 2))
    found.append(committed(record, 5, 9.0, 0, 10, 2))
    found.append(committed(record, 5, 8.5, 1, NEW, 3))
    return found


def test_a_line_is_read_as_it_was_written(record: ModuleType, tmp_path: Path) -> None:
    out = record.Record(tmp_path / "record")
    assert not record.training_goes_on(tmp_path / "record")
    out.write(record.COMMIT, 1, 7, seconds=0.5, graphs=2)
    assert record.training_goes_on(tmp_path / "record")
    line = record.parse((tmp_path / "record").read_text())
    assert (line.what, line.rank, line.step, line.seconds, line.graphs) == ("commit", 1, 7, 0.5, 2)


def test_a_full_step_is_one_that_every_rank_has_committed(record: ModuleType) -> None:
    assert record.full_steps(lines(record)[:-1], 2) == [(step, step + 0.25) for step in range(5)]
    assert record.full_steps(lines(record), 2)[-1] == (5, 9.0)


def test_a_normal_step_and_block_are_medians(record: ModuleType) -> None:
    before = [line for line in lines(record) if line.time_s < 5]
    assert record.normal_step_s(before, 2) == 1.0
    assert record.normal_block(before, 1) == (0.2, 0.1)


def test_what_was_compiled_before_the_kill_does_not_count(record: ModuleType) -> None:
    assert record.holder(lines(record), 1) == NEW
    assert record.compiled_since(lines(record), NEW, since_s=4.5) == 1
    assert record.compiled_since(lines(record), OLD, since_s=4.5) == 0
