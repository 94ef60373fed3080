"""What a worker says reaches its agent in order, also across an agent that comes back."""

import json
import math
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from trainmover.runtime import reporting
from trainmover.runtime.reporting import Reporter
from trainmover.schemas.events import StandbyWarmed, UserError
from trainmover.schemas.local import LINE, Beat, Crash

WITHIN_S = 5.0


class Agent:
    """The agent's end of the socket, driven by hand."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(WITHIN_S)
        self._sock: socket.socket | None = None

    def accept(self) -> dict[str, Any]:
        """The hello of the next connection."""
        self._sock, _ = self._listener.accept()
        self._sock.settimeout(WITHIN_S)
        self._lines = self._sock.makefile("rb")
        return self.line()

    def line(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self._lines.readline())
        return parsed

    def next(self, kind: str) -> dict[str, Any]:
        while (line := self.line())["kind"] != kind:
            pass
        return line

    def facts(self, count: int) -> list[int]:
        """Who warmed in how many seconds, in the order of arrival."""
        return [json.loads(self.next("fact")["payload"])["rank"] for _ in range(count)]

    def acknowledge(self, fact: int) -> None:
        assert self._sock is not None
        self._sock.sendall(b'{"id": %d}\n' % fact)

    def hang_up(self) -> None:
        assert self._sock is not None
        self._lines.close()
        self._sock.close()

    def close(self) -> None:
        if self._sock is not None:
            self.hang_up()
        self._listener.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent"


@pytest.fixture
def agent(path: Path) -> Iterator[Agent]:
    made = Agent(path)
    yield made
    made.close()


@pytest.fixture
def reporter(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reporter]:
    """Beats by itself only every minute."""
    monkeypatch.setattr(reporting, "RETRY_S", 0.01)
    made = Reporter(str(path), "a", beat_s=60)
    made.start()
    yield made
    made.close()


def fact(rank: int) -> StandbyWarmed:
    return StandbyWarmed(job="j", run="r", worker="a", rank=rank, warm_s=1)


def test_facts_arrive_in_order_after_a_hello(agent: Agent, reporter: Reporter) -> None:
    for rank in range(5):
        reporter.fact(fact(rank))
    hello = agent.accept()
    assert (hello["kind"], hello["worker"]) == ("hello", "a")
    assert agent.facts(5) == [0, 1, 2, 3, 4]


def test_a_fact_carries_its_type_and_when_it_happened(agent: Agent, reporter: Reporter) -> None:
    agent.accept()
    reporter.fact(fact(3))
    line = agent.next("fact")
    assert line["type"] == StandbyWarmed.TYPE
    assert StandbyWarmed.model_validate_json(line["payload"]) == fact(3)
    assert line["time"] > 1e9


def test_facts_wait_for_an_agent_that_is_not_there_yet(path: Path, reporter: Reporter) -> None:
    reporter.fact(fact(0))
    agent = Agent(path)
    agent.accept()
    assert agent.facts(1) == [0]
    agent.close()


def test_what_is_not_acknowledged_is_said_again_to_the_agent_that_comes_back(
    agent: Agent, reporter: Reporter
) -> None:
    agent.accept()
    for rank in range(4):
        reporter.fact(fact(rank))
    assert agent.facts(4) == [0, 1, 2, 3]
    agent.acknowledge(2)
    assert not reporter.flush(0.02)
    agent.hang_up()
    reporter.fact(fact(4))
    reporter.beat(lambda: Beat(worker="a"), now=True)
    agent.accept()
    assert agent.facts(3) == [2, 3, 4]


def test_an_agent_that_hangs_up_is_noticed_by_the_next_fact(
    agent: Agent, reporter: Reporter
) -> None:
    agent.accept()
    agent.next("beat")
    agent.hang_up()
    reporter.fact(fact(7))
    agent.accept()
    assert agent.facts(1) == [7]


def test_flush_returns_when_everything_is_acknowledged(agent: Agent, reporter: Reporter) -> None:
    agent.accept()
    reporter.fact(fact(0))
    reporter.fact(fact(1))
    agent.facts(2)
    assert not reporter.flush(0.02)
    agent.acknowledge(2)
    assert reporter.flush(WITHIN_S)


def test_a_beat_is_the_latest_one_and_goes_out_at_once_when_asked(
    agent: Agent, reporter: Reporter
) -> None:
    agent.accept()
    assert agent.next("beat")["phase"] == "starting"
    for step in range(3):
        reporter.beat(partial(Beat, worker="a", phase="step", committed=step))
    reporter.beat(partial(Beat, worker="a", phase="hold", committed=3), now=True)
    beat = agent.next("beat")
    assert (beat["phase"], beat["committed"]) == ("hold", 3)


def test_a_loss_that_is_no_number_any_more_is_a_beat_all_the_same(
    agent: Agent, reporter: Reporter
) -> None:
    agent.accept()
    assert agent.next("beat")["numbers"] == {}
    reporter.beat(partial(Beat, worker="a", numbers={"loss": math.nan, "norm": math.inf}), now=True)
    beat = LINE.validate_python(agent.next("beat"))
    assert isinstance(beat, Beat)
    assert math.isnan(beat.numbers["loss"])
    assert beat.numbers["norm"] == math.inf


def test_a_beat_goes_out_by_itself_after_its_interval(agent: Agent, path: Path) -> None:
    reporter = Reporter(str(path), "a", beat_s=0.01)
    reporter.start()
    try:
        agent.accept()
        for _ in range(3):
            assert agent.next("beat")["worker"] == "a"
    finally:
        reporter.close()


def test_a_crash_is_said_after_the_facts_before_it(agent: Agent, reporter: Reporter) -> None:
    reporter.fact(fact(0))
    error = UserError(
        exception="KeyError", message="'x'", traceback="", rank=1, step=5, committed=5
    )
    reporter.crash(Crash(worker="a", error=error))
    agent.accept()
    assert agent.facts(1) == [0]
    assert agent.next("crash")["error"]["exception"] == "KeyError"
    agent.acknowledge(1)
    assert reporter.flush(WITHIN_S)


def test_a_worker_without_an_agent_does_not_collect_facts_for_ever(
    reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "MAX_FACTS", 3)
    for rank in range(3):
        reporter.fact(fact(rank))
    with pytest.raises(RuntimeError, match="3 facts wait for the agent at "):
        reporter.fact(fact(3))


def test_close_ends_the_threads_with_and_without_an_agent(agent: Agent, path: Path) -> None:
    for connected in (False, True):
        reporter = Reporter(str(path if connected else path.with_name("nobody")), "a", beat_s=60)
        reporter.start()
        if connected:
            agent.accept()
            agent.next("beat")
        reporter.close()
        names = {thread.name for thread in threading.enumerate()}
        assert not names & {"tm-report", "tm-report-acks"}
