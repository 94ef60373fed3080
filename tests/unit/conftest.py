"""Fixtures of the tests that run `train` in this process."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog

if TYPE_CHECKING:  # most unit tests need no torch
    from tests.unit.one_rank import OneRank


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """A command configures the log of its whole process, onto a stream that a test may close."""
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker, or torch, sets for its whole process does not outlive the test."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


@pytest.fixture
def one(tmp_path: Path, process: None) -> Iterator["OneRank"]:
    from tests.unit.one_rank import OneRank

    made = OneRank(tmp_path)
    yield made
    made.close()
