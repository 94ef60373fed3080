"""Services over a real server: two copies, restarts of the bus, and the process round them."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest
import structlog

from trainmover.bus.job import JobBus
from trainmover.bus.nats import connect
from trainmover.bus.server import EmbeddedServer
from trainmover.schemas.commands import Answer, AnyCommand, Retire
from trainmover.schemas.events import JobFailed, MigrationCompleted
from trainmover.schemas.recorded import Recorded
from trainmover.services import process, shell
from trainmover.services.contract import Ask, Inputs, Output, Service
from trainmover.telemetry.spans import SILENT
from trainmover.telemetry.stream import StreamTracer

SECRET = "5ec2e7"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path / "bus")
    await server.start()
    yield server
    await server.stop()


async def connected(server: EmbeddedServer) -> JobBus:
    bus = await connect(server.url, "j", deadline_s=10)
    return JobBus(bus, job="j", run="r", source="test", secret=bytes.fromhex(SECRET))


def migrations(recorded: Sequence[Recorded]) -> list[int]:
    return [r.event.generation for r in recorded if isinstance(r.event, MigrationCompleted)]


def silent() -> StreamTracer:
    return StreamTracer(SILENT, "toy")


def counting(last: int) -> Service[int]:
    """Asks worker `w` before each of the generations 2..last."""

    def evolve(state: int, recorded: Recorded) -> int:
        return state + isinstance(recorded.event, MigrationCompleted)

    def decide(state: int, inputs: Inputs) -> Sequence[Output]:
        wanted = state + 2
        if wanted > last:
            return [JobFailed(job="j", run="r", reason="the toy is over", exit_code=1)]
        answer = inputs.answers.get("w")
        if answer is None or answer.about != wanted:
            return [Ask("w", Retire(reason=str(wanted)))]
        event = MigrationCompleted(job="j", run="r", generation=wanted, incident="g", committed=0)
        return [event]

    return Service("toy", 0, evolve, decide)


async def test_two_copies_decide_each_thing_once_while_the_bus_is_killed_and_restarted(
    server: EmbeddedServer,
) -> None:
    buses = [await connected(server) for _ in range(4)]
    worker, reader, *copies = buses

    async def handler(command: AnyCommand) -> Answer:
        assert isinstance(command, Retire)
        return Answer(worker="w", about=int(command.reason))

    await worker.answer("w", handler)
    stop, recorded, kills = asyncio.Event(), list[Recorded](), 0
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        for bus in copies:
            tasks.create_task(
                shell.run(counting(40), bus, silent(), stop=stop, tick_s=0.02, linger_s=60)
            )
        async for item in reader.follow():
            recorded.append(item)
            if isinstance(item.event, JobFailed):
                break
            if len(recorded) in (10, 25):
                os.kill(server.pid, signal.SIGKILL)
                await server.wait()
                await server.start()
                kills += 1
        stop.set()
    assert kills == 2
    assert migrations(recorded) == list(range(2, 41))
    assert await reader.last_seq() == 40
    for bus in buses:
        await bus.close()


async def start(name: str, server: EmbeddedServer, **environ: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"trainmover.services.{name}"),
        *("--bus", server.url, "--job", "j", "--run", "r"),
        env={**os.environ, "TRAINMOVER_SECRET": SECRET, **environ},
        stderr=asyncio.subprocess.PIPE,
    )


async def lines_until(service: asyncio.subprocess.Process, event: str) -> list[dict[str, object]]:
    assert service.stderr is not None
    found: list[dict[str, object]] = []
    async with asyncio.timeout(20):
        while not found or found[-1]["event"] != event:
            found.append(json.loads(await service.stderr.readline()))
    return found


@pytest.mark.parametrize("name", ["detector", "planner", "mover"])
async def test_a_service_starts_logs_json_and_ends_by_a_signal(
    name: str, server: EmbeddedServer
) -> None:
    service = await start(name, server, TRAINMOVER_PARENT_PID=str(os.getpid()))
    (started,) = await lines_until(service, "service.started")
    assert (started["service"], started["job"], started["pid"]) == (name, "j", service.pid)
    service.send_signal(signal.SIGTERM)
    (ended,) = await lines_until(service, "service.ended")
    assert (ended["code"], await asyncio.wait_for(service.wait(), 10)) == (143, 143)


async def test_a_service_whose_named_parent_is_gone_does_not_stay(server: EmbeddedServer) -> None:
    service = await start("mover", server, TRAINMOVER_PARENT_PID="1")
    assert await asyncio.wait_for(service.wait(), 20) == -signal.SIGKILL
    assert service.stderr is not None
    assert await service.stderr.read() == b""


@pytest.fixture
def log_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def toy() -> Service[int]:
    return counting(2)


@pytest.mark.usefixtures("log_as_before")
def test_without_a_bus_a_service_exits_6_and_says_what_to_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "CONNECT_S", 0.3)
    arguments = ["--bus", "nats://127.0.0.1:1", "--job", "j", "--run", "r"]
    assert process.main("toy", "About.", toy, arguments) == 6
    line = json.loads(capsys.readouterr().err)
    assert line["event"] == "service.no_bus"
    assert "check that it runs" in line["error"]


@pytest.mark.usefixtures("log_as_before")
def test_help_teaches_and_wrong_usage_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        process.main("toy", "About the toy.", toy, ["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "About the toy." in text
    assert "TRAINMOVER_SECRET" in text
    with pytest.raises(SystemExit) as end:
        process.main("toy", "", toy, ["--bus", "b", "--job", "Not_A_Name", "--run", "r"])
    assert end.value.code == 2
    assert "inner dashes" in capsys.readouterr().err
    monkeypatch.setenv("TRAINMOVER_SECRET", "no hex")
    assert process.main("toy", "", toy, ["--bus", "b", "--job", "j", "--run", "r"]) == 2
