"""One line a record: JSON with what it is about, or words for people."""

import json
from collections.abc import Iterator

import pytest
import structlog

from trainmover.telemetry import logs


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_json_lines_carry_what_is_fixed_and_what_is_known_at_the_moment(
    capsys: pytest.CaptureFixture[str],
) -> None:
    subject = logs.configure("info", as_json=True, about={"job": "j", "worker": "m-w1"})
    log = structlog.get_logger()
    log.info("before", step=3)
    facts: dict[str, object] = {"rank": 1, "generation": 2}
    subject.facts = lambda: facts
    log.warning("then")
    facts["generation"] = 3
    log.info("after")
    log.debug("too little")
    before, then, after = map(json.loads, capsys.readouterr().err.splitlines())
    assert before.items() >= {"job": "j", "worker": "m-w1", "event": "before", "step": 3}.items()
    assert (then["rank"], then["generation"], then["level"]) == (1, 2, "warning")
    assert after["generation"] == 3


def test_people_read_words_without_the_fields_of_the_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logs.configure("warning", as_json=False, about={"job": "j", "worker": "m-w1"})
    structlog.get_logger().warning("extras.late", parts=["loader"])
    line = capsys.readouterr().err
    assert "extras.late" in line
    assert "m-w1" not in line
