"""The exhaustive model's shortest history without each rule, and where the rule is kept."""

import re

import pytest
from tests.unit.commit_model import (
    HISTORIES,
    PH,
    REFERENCE,
    ROOT,
    Product,
    reference,
    replay,
    wrong_end,
)
from tests.unit.commit_steps import follow

from trainmover.runtime.commit import Phase

KEPT_IN = {
    "CUT": ("runtime/commit.py", "runtime/links.py", "runtime/seat.py"),
    "PROMISE": ("runtime/commit.py", "runtime/seat.py"),
    "ALL": ("services/mover/verdict.py", "services/mover/decide.py"),
    "KEEP2": ("runtime/commit.py",),
    "REBUDDY": ("runtime/commit.py", "runtime/vote.py", "runtime/recovery.py"),
    "XKNOW": ("runtime/commit.py",),
    "DIRTYACK": ("runtime/commit.py", "services/mover/migration.py"),
    "TAIL": ("runtime/commit.py", "runtime/block.py"),
    "EXIT": ("runtime/run.py", "runtime/performance.py"),
    "RELINK": ("runtime/news.py", "services/planner/choice.py"),
    "WAL": ("services/mover/decide.py", "services/mover/ahead.py"),
    "REMEMBER": ("runtime/commit.py",),
    "RESET": ("services/planner/state.py", "agent/tenure.py"),
    "FASTFAIL": ("runtime/commit.py", "runtime/vote.py"),
}


@pytest.mark.parametrize("rule", REFERENCE.ALLRULES)
def test_the_model_goes_wrong_as_recorded_without(rule: str) -> None:
    model = reference(HISTORIES[rule]["scenario"], rule)
    *_, (_, _, end) = replay(model, HISTORIES[rule]["history"])
    assert wrong_end(model, end) == HISTORIES[rule]["wrong"]


@pytest.mark.parametrize("rule", REFERENCE.ALLRULES)
def test_each_rule_is_named_where_it_is_kept(rule: str) -> None:
    for place in KEPT_IN[rule]:
        assert re.search(rf"\b{rule}\b", (ROOT / place).read_text(encoding="utf-8")), place


def test_remember_who_was_told_the_abort_of_a_move_does_not_freeze_for_it() -> None:
    record = HISTORIES["REMEMBER"]
    without, model = reference(record["scenario"], "REMEMBER"), reference(record["scenario"])
    *_, (_, _, frozen) = replay(without, record["history"])
    product = Product(model)
    for before, label, after in replay(model, record["history"]):
        follow(product, before, label, after)
    assert frozen[0][2][PH] == "Z"
    assert product.positions[2].phase is Phase.COMPUTING
    assert wrong_end(model, after) == ""
