"""An agent and `trainmover run` with scripts that need no torch: real processes, real ends."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TextIO, TypeVar

import pytest

from trainmover.agent import agent as agent_module
from trainmover.agent.agent import Agent, WorkersKeepFailing
from trainmover.agent.orders import Program
from trainmover.agent.roster import Roster
from trainmover.agent.settings import Settings
from trainmover.bus.job import JobBus
from trainmover.bus.memory import MemoryBus
from trainmover.schemas.base import Event
from trainmover.schemas.events import (
    FaultInjected,
    JobCompleted,
    MigrationPlanned,
    Replacement,
    WorkerExited,
    WorkerFinished,
    WorkerRegistered,
    WorkerStarted,
)
from trainmover.telemetry.spans import SILENT
from trainmover.telemetry.stream import StreamTracer

E = TypeVar("E", bound=Event)

SECRET = b"s"
DEADLINE_S = 30.0

WAIT = """
import os, signal
print("waiting", flush=True)
if os.fork() == 0:
    signal.pause()  # a child of the worker, as a loader has
signal.pause()
"""

PRINT = """
import signal, sys
print(__name__, sys.argv[1:])
print("bad", file=sys.stderr)
signal.pause()
"""

SPEAK = """
import json, os, signal, socket, sys
e = os.environ
worker = e["TRAINMOVER_WORKER"]
agent = socket.socket(socket.AF_UNIX)
agent.connect(e["TRAINMOVER_AGENT"])
lines = agent.makefile("rw")
def say(**line):
    lines.write(json.dumps(line) + "\\n"); lines.flush()
def fact(id, type, **event):
    event.update(job=e["TRAINMOVER_JOB"], run=e["TRAINMOVER_RUN"], worker=worker)
    say(kind="fact", id=id, type=type, payload=json.dumps(event), time=1.0)
say(kind="hello", worker=worker)
register = dict(machine=e["TRAINMOVER_MACHINE"], local_index=0, addresses=[])
for _ in range(2):  # repeated until acknowledged
    fact(0, "worker.registered", **register)
assert json.loads(lines.readline())["id"] == 0
"""

FINISH = (
    SPEAK
    + """
fact(1, "worker.finished", rank=0, generation=1, committed=3, digest="d")
say(kind="beat", worker=worker, rank=0, phase="done", committed=3)
while json.loads(lines.readline())["id"] != 1:
    pass
print("acknowledged")
signal.pause()
"""
)

CRASH = (
    SPEAK
    + """
error = dict(exception="ValueError", message="boom", traceback="...", rank=0, step=2, committed=1)
say(kind="crash", worker=worker, error=error)
sys.exit(3)
"""
)


class Shown:
    """What the agent showed, with a way to wait for it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._came = asyncio.Event()

    def __call__(self, line: str, stream: TextIO) -> None:
        self.lines.append(line)
        self._came.set()

    async def until(self, text: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not any(text in line for line in self.lines):
                self._came.clear()
                await self._came.wait()


class Site:
    """An agent on an in-memory bus."""

    def __init__(self, script: Path, directory: Path, size: int) -> None:
        program = Program(script=str(script), arguments=("--lr", "1"))
        self.shown = Shown()
        self.memory = MemoryBus()
        self.bus = JobBus(self.memory, job="j", run="r", source="agent/m", secret=SECRET)
        settings = Settings(
            job="j",
            run="r",
            machine="m",
            program=program,
            layout=f"dp={size}",
            bus="nats://nowhere",
            directory=directory,
            workers_per_machine=size,
            num_standbys=0,
            log_dir=directory / "logs",
        )
        self.agent = Agent(
            settings, self.bus, Roster("m", size), StreamTracer(SILENT, "m"), self.shown
        )

    async def first(self, model: type[E], where: Callable[[E], bool] = bool) -> E:
        """The first event of a type; waits for it."""
        async with asyncio.timeout(DEADLINE_S):
            async for recorded in self.bus.follow():
                if isinstance(recorded.event, model) and where(recorded.event):
                    return recorded.event
        raise AssertionError("a stream does not end")

    async def started(self, worker: str) -> WorkerStarted:
        return await self.first(WorkerStarted, lambda event: event.worker == worker)


@asynccontextmanager
async def running(script: Path, text: str, size: int = 1) -> AsyncIterator[Site]:
    """An agent that runs `text`; stopped, with its workers, at the end of the block."""
    write(script, text)
    site = Site(script, script.parent, size)
    task = asyncio.create_task(site.agent.run())
    try:
        yield site
    finally:
        site.agent.stop()
        await asyncio.wait_for(task, DEADLINE_S)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "script.py"


def write(path: Path, text: str) -> None:
    path.write_text(text)


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_killed_worker_is_reported_and_a_fresh_one_takes_its_place(script: Path) -> None:
    async with running(script, WAIT) as site:
        started = await site.first(WorkerStarted)
        await site.shown.until("waiting")
        os.kill(started.pid, signal.SIGKILL)
        exited = await site.first(WorkerExited)
        assert [(e.worker, e.code) for e in exited.exits] == [("m-w0", -signal.SIGKILL)]
        fresh = await site.started("m-w1")
        assert fresh.local_index == started.local_index


async def test_workers_that_die_together_are_one_event(script: Path) -> None:
    async with running(script, WAIT, size=2) as site:
        pids = [(await site.started(worker)).pid for worker in ("m-w0", "m-w1")]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert len((await site.first(WorkerExited)).exits) == 2


async def test_output_is_shown_with_its_worker_and_kept_raw(script: Path) -> None:
    async with running(script, PRINT) as site:
        await site.shown.until("[w0] __main__ ['--lr', '1']")
        await site.shown.until("[w0] bad")
        raw = (script.parent / "logs" / "m-w0.log").read_text()
        assert sorted(raw.splitlines()) == ["__main__ ['--lr', '1']", "bad"]


async def test_facts_are_stored_once_and_then_acknowledged(script: Path) -> None:
    async with running(script, FINISH) as site:
        await site.shown.until("] acknowledged")
        assert (await site.first(WorkerFinished)).committed == 3
        registered = [m for m in site.memory.stored if WorkerRegistered.TYPE in m.subject]
        assert len(registered) == 1


async def test_the_exception_that_ended_a_worker_is_in_its_exit(script: Path) -> None:
    async with running(script, CRASH) as site:
        (one,) = (await site.first(WorkerExited)).exits
        assert one.code == 3
        assert one.error is not None
        assert one.error.message == "boom"


async def test_an_uncaught_exception_shows_the_frames_of_the_script_only(script: Path) -> None:
    write(script, "def f():\n    raise ValueError('boom')\nf()\n")
    site = Site(script, script.parent, 1)
    with pytest.raises(WorkersKeepFailing, match="their output says why"):
        await asyncio.wait_for(site.agent.run(), DEADLINE_S)
    assert (await site.first(WorkerExited)).exits[0].code == 1
    first = [line for line in site.shown.lines if line.startswith("[w0]")]
    assert first[0] == "[w0] Traceback (most recent call last):"
    assert first[1].startswith(f'[w0]   File "{script}", line 3')
    assert first[-1] == "[w0] ValueError: boom"


async def test_an_import_that_leaves_a_thread_makes_workers_spawn(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        script.parent / "threading_import.py",
        "import threading, time\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n",
    )
    async with running(script, "import threading_import\n" + PRINT) as site:
        await site.shown.until("[w0] __main__ ['--lr', '1']")
    assert "threading_import" in capsys.readouterr().out


async def test_a_leaver_that_lingers_is_killed(script: Path) -> None:
    async with running(script, WAIT) as site:
        started = await site.first(WorkerStarted)
        plan = MigrationPlanned(
            job="j",
            run="r",
            generation=2,
            incident="g2",
            kind="crash",
            replacements=(Replacement(rank=0, leaver=started.worker, joiner="m-w9"),),
            members=(),
            reason="it is stopped",
        )
        os.kill(started.pid, signal.SIGSTOP)
        await site.bus.publish(plan)
        assert (await site.first(WorkerExited)).exits[0].code == -signal.SIGKILL


async def test_a_drill_says_what_it_does_before_it_kills(script: Path) -> None:
    async with running(script, WAIT) as site:
        why = FaultInjected(job="j", run="r", kind="kill", worker="m-w0")
        await site.first(WorkerStarted)
        assert await site.agent.kill("m-w0", why=why) == ""
        await site.first(WorkerExited)
        kinds = [m.subject.split(".", 2)[2] for m in site.memory.stored]
        assert kinds.index("fault.injected.v1") < kinds.index("worker.exited.v1")
        assert "m-w7" in await site.agent.kill("m-w7", why=why)


async def test_a_completed_job_leaves_no_worker_and_starts_none(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_module, "RETIRE_WITHIN_S", 0.2)
    write(script, WAIT)
    site = Site(script, script.parent, 1)
    task = asyncio.create_task(site.agent.run())
    pid = (await site.first(WorkerStarted)).pid
    end = JobCompleted(job="j", run="r", completed_steps=3, state_digest="d")
    await site.bus.publish(end)
    assert await asyncio.wait_for(task, DEADLINE_S) == end
    assert not lives(pid)
    assert sum(WorkerStarted.TYPE in m.subject for m in site.memory.stored) == 1
