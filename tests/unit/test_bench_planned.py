"""bench/planned.py: what a move costs is read correctly from the lines of the ranks."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
FOLDERS = (str(BENCH / "moves"), str(BENCH / "rivals"))
OLD, NEW = (11, 12, 13, 14), (11, 12, 13, 15)
"""Processes of the ranks before rank 3 moves, and after."""


@pytest.fixture
def load() -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of the bench, as the bench does; none of them stays."""
    before = set(sys.modules)
    sys.path[:0] = FOLDERS
    try:
        yield importlib.import_module
    finally:
        for folder in FOLDERS:
            sys.path.remove(folder)
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(FOLDERS):
                del sys.modules[name]


@pytest.fixture
def ledger(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("ledger")


@pytest.fixture
def stretches(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("stretches")


@pytest.fixture
def findings(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("findings")


def commits(step: int, at_s: float, pids: tuple[int, ...] = OLD, cpu_s: float = 0.0) -> list[Any]:
    """All ranks commit a step, 1 ms apart."""
    line = sys.modules["ledger"].Line
    return [
        line(at_s + rank / 1000, rank, pid, "commit", step, 4, cpu_s)
        for rank, pid in enumerate(pids)
    ]


def every_second(steps: range, first_s: float = 0.0, **more: Any) -> list[Any]:
    return [x for i, step in enumerate(steps) for x in commits(step, first_s + i, **more)]


def test_a_pause_is_from_the_last_step_without_the_joiner_to_its_first(ledger: ModuleType) -> None:
    lines = [*commits(7, 10.0), *commits(8, 11.0), *commits(9, 11.5, NEW), *commits(10, 12.0, NEW)]
    assert ledger.pause(lines, {15}) == (11.003, 11.503)


def test_there_is_no_pause_before_all_ranks_committed_the_joiners_first_step(
    ledger: ModuleType,
) -> None:
    lines = [*commits(8, 11.0), *commits(9, 11.5, NEW)[1:]]
    assert ledger.pause(lines, {15}) is None
    assert ledger.pause(lines, {99}) is None


def test_ranks_that_move_at_once_have_one_pause(ledger: ModuleType) -> None:
    lines = [*commits(8, 11.0), *commits(9, 12.0, (21, 12, 13, 24))]
    assert ledger.pause(lines, {21, 24}) == (11.003, 12.003)


def test_a_stretch_counts_whole_steps_and_the_time_of_all_ranks(stretches: ModuleType) -> None:
    lines = [x for step in range(6) for x in commits(step, 0.5 * step, cpu_s=0.1 * step)]
    found = stretches.stretch(lines, 0.4, 2.2)  # steps 1 to 4
    assert found.steps == 3
    assert (found.wall_s, found.cpu_s) == pytest.approx((0.5, 0.4))


def test_a_stretch_in_which_a_process_changed_says_nothing(stretches: ModuleType) -> None:
    lines = [*commits(1, 1.0), *commits(2, 2.0), *commits(3, 3.0, NEW)]
    assert stretches.stretch(lines, 0.0, 2.5) is not None
    assert stretches.stretch(lines, 0.0, 9.0) is None
    assert stretches.stretch(lines, 1.5, 2.5) is None


def test_what_an_interruption_costs_is_missing_from_the_effective_time(
    stretches: ModuleType,
) -> None:
    lines = [
        *every_second(range(10), 0.0),
        *every_second(range(10, 17), 12.0),  # 2 s were lost
        *every_second(range(17, 29), 19.0),
    ]
    done = [stretches.Interruption(8.9, 14.5), stretches.Interruption(18.9, 24.5)]
    found = stretches.periods(lines, done, 28.9)
    assert [p.steps for p in found] == [8, 10]
    assert [p.wall_s for p in found] == pytest.approx([10.0, 10.0])
    assert [p.undisturbed_s for p in found] == pytest.approx([1.0, 1.0])
    assert stretches.effective(found) == pytest.approx(0.9)


def test_the_time_without_steps_is_in_the_period_of_its_interruption(
    stretches: ModuleType,
) -> None:
    lines = [*every_second(range(5)), *every_second(range(5, 16), 9.0)]
    found = stretches.periods(lines, [stretches.Interruption(4.5, 10.0)], 19.5)
    assert [(p.steps, p.wall_s) for p in found] == [(11, 15.0)]


def test_a_period_without_steps_after_its_interruption_is_refused(stretches: ModuleType) -> None:
    lines = every_second(range(10))
    with pytest.raises(ValueError, match="expected steps"):
        stretches.periods(lines, [stretches.Interruption(2.0, 9.5)], 12.0)


def test_a_step_that_a_rank_committed_twice_is_noticed(stretches: ModuleType) -> None:
    lines = [*commits(1, 1.0), *commits(2, 2.0), *commits(3, 3.0, NEW)]
    assert stretches.done_again(lines) == 0
    assert stretches.done_again([*lines, lines[-1]]) == 1


def test_the_last_rank_counts_in_what_a_migration_reached(load: Callable[[str], Any]) -> None:
    ranks = [
        {"reached": {"frozen": 1.0, "collected": 1.2, "restored": 1.3, "resumed": 2.1}},
        {"reached": {"collected": 1.3, "restored": 1.8, "resumed": 2.0}},  # the joiner
    ]
    events = {
        "completed": {"ranks": ranks},
        "decided": {"time_s": 1.1},
        "switched": {"time_s": 1.9},
    }
    assert load("moving").moments(events) == {
        "frozen": 1.0,
        "decided": 1.1,
        "collected": 1.3,
        "restored": 1.8,
        "switched": 1.9,
        "resumed": 2.1,
    }


def figures(findings: ModuleType, **of: float) -> dict[str, Any]:
    return {name: findings.Found(value, value, value) for name, value in of.items()}


@pytest.mark.parametrize(
    ("beyond", "ratio", "effective", "verdict"),
    [
        ({1: 0.10, 2: 0.11, 3: 0.12}, 1.02, 0.98, "reached"),
        ({1: 0.16, 2: 0.17, 3: 0.20}, 1.04, 0.96, "NOT REACHED"),
        ({1: 0.16, 2: 0.12, 3: 0.13}, 1.04, 0.96, "NOT REACHED"),
    ],
)
def test_each_target_is_said_to_be_reached_or_not(
    findings: ModuleType, beyond: dict[int, float], ratio: float, effective: float, verdict: str
) -> None:
    moved = {
        size: figures(findings, downtime=cost + 0.04 * size, raw=0.04 * size, beyond=cost)
        for size, cost in beyond.items()
    }
    beside = {what: figures(findings, prepare=ratio, equals=1.0) for what in ("cpu_s", "wall_s")}
    endured = {"ours": figures(findings, effective=effective)}
    lines = findings.verdicts(moved, beside, endured).splitlines()
    assert [line.split(":")[0] for line in lines] == [verdict] * 5
    assert findings.verdicts({}, {}, {}) == ""


def test_a_table_has_what_was_measured_and_no_more(
    findings: ModuleType, stretches: ModuleType
) -> None:
    move = sys.modules["moving"].Move
    moves = [
        move((2,), 0.3, 0.05, {"frozen": 0.01, "first step": 0.34}, 115_000_000, 1, 2, 3, 0.1),
        move((1,), 0.4, 0.05, {"frozen": 0.01, "first step": 0.44}, 115_000_000, 1, 2, 3, 0.1),
    ]
    text = findings.tables(findings.of_moves(moves), {}, {})
    assert "0.350 (0.300 to 0.400)" in text
    assert "0.250 (0.200 to 0.300)" in text
    assert text.count("\n| -") == 1
    periods = [stretches.Period(50, 10.0, 0.1)]
    endured = findings.of_endurance({"ours": periods, "restart": []})
    assert "0.500 (0.500 to 0.500)" in findings.tables({}, {}, endured)
