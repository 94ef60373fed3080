"""bench/recovery.py: what a kill cost is read correctly from the lines of the ranks."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

RIVALS = Path(__file__).resolve().parents[2] / "bench/rivals"
NAMES = ("ledger", "table", "measure", "jobs", "children", "environment")


@pytest.fixture
def ledger() -> Iterator[ModuleType]:
    yield from loaded("ledger")


@pytest.fixture
def table() -> Iterator[ModuleType]:
    yield from loaded("table")


def loaded(name: str) -> Iterator[ModuleType]:
    sys.path.insert(0, str(RIVALS))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(RIVALS))
        for known in NAMES:
            sys.modules.pop(known, None)


def commits(
    ledger: ModuleType, step: int, at_s: float, pids: list[int], strength: int
) -> list[Any]:
    """Ranks 0, 1, ... commit a step, 1 ms apart."""
    return [
        ledger.Line(at_s + rank / 1000, rank, pid, "commit", step, strength)
        for rank, pid in enumerate(pids)
    ]


def test_a_step_is_full_when_its_last_rank_committed_it(ledger: ModuleType) -> None:
    lines = commits(ledger, 7, 10.0, [1, 2, 3, 4], 4)
    assert ledger.full_steps(lines[:3]) == []
    assert ledger.full_steps(lines) == [(7, 10.003)]


def test_a_step_that_the_killed_rank_still_finished_is_no_recovery(ledger: ModuleType) -> None:
    lines = [
        *commits(ledger, 7, 10.0, [1, 2, 3, 4], 4),  # 4 is killed at 9.5, its line comes late
        *commits(ledger, 8, 12.0, [1, 2, 3, 5], 4),
    ]
    assert ledger.recovered_s(lines, killed=4, at_s=9.5) == 12.003


def test_steps_of_fewer_ranks_are_no_recovery_and_are_told_apart(ledger: ModuleType) -> None:
    lines = [
        *commits(ledger, 7, 10.0, [1, 2, 3], 3),
        *commits(ledger, 8, 11.0, [1, 2, 3, 5], 3),  # the new one heals and gives no gradient
        *commits(ledger, 9, 12.0, [1, 2, 3, 5], 4),
    ]
    assert ledger.recovered_s(lines, killed=4, at_s=9.5) == 12.003
    assert ledger.reduced_s(lines, at_s=9.5) == 10.0


def test_a_step_that_all_ranks_do_again_counts_when_the_last_did_it(ledger: ModuleType) -> None:
    lines = [
        *commits(ledger, 7, 10.0, [1, 2, 3], 4),  # survivors of a restart, before their end
        *commits(ledger, 7, 16.0, [5, 6, 7, 8], 4),
    ]
    assert ledger.recovered_s(lines, killed=4, at_s=9.5) == 16.003


def test_a_normal_step_is_the_median_and_no_outlier(ledger: ModuleType) -> None:
    times = [0.0, 1.0, 2.0, 9.0, 10.0, 11.0]
    lines = [x for step, at in enumerate(times) for x in commits(ledger, step, at, [1, 2, 3, 4], 4)]
    assert ledger.normal_step_s(lines) == 1.0


def test_phases_add_up_to_the_whole(ledger: ModuleType) -> None:
    moments = {"detected": 10.1, "planned": 10.3, "first step": 11.0}
    found = ledger.durations(10.0, moments)
    assert list(found) == ["detected", "planned", "first step"]
    assert sum(found.values()) == pytest.approx(1.0)


def test_half_a_line_waits_for_its_rest(ledger: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    tail = ledger.Tail(path)
    with path.open("a") as file:
        file.write("10.5 2 77 commit 3 4 0.25\n11.5 2 ")
        file.flush()
        assert [ledger.parse(text) for text in tail.new()] == [
            ledger.Line(10.5, 2, 77, "commit", 3, 4, 0.25)
        ]
        file.write("77 commit 4 4 0.5\n")
    assert [ledger.parse(text).step for text in tail.new()] == [4]


def test_what_a_rank_writes_is_what_is_read(ledger: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger.Ledger(str(path)).write("commit", rank=2, step=5, strength=4)
    (line,) = [ledger.parse(text) for text in ledger.Tail(path).new()]
    assert (line.rank, line.what, line.step, line.strength) == (2, "commit", 5, 4)


def test_a_target_that_is_missed_is_said_to_be(table: ModuleType) -> None:
    found = {"ours": {"median_s": 0.6}, "restart": {"median_s": 9.0}, "torchft": {"median_s": 5.0}}
    assert [line.split(":")[0] for line in table.verdicts(found).splitlines()] == [
        "NOT REACHED",
        "reached",
        "NOT REACHED",
    ]


def test_a_kill_without_recovery_counts_as_failed(table: ModuleType) -> None:
    outcome = sys.modules["measure"].Outcome
    kills = [
        outcome("ours", 0, 1, 0.4, 0.07, {"detected": 0.1, "first step": 0.37}, None),
        outcome("ours", 0, 2, None, 0.07, {}, None, "expected the job to recover"),
    ]
    found = table.summary("ours", kills)
    assert (found["kills"], found["failed"], found["median_s"]) == (2, 1, 0.4)
