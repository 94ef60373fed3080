"""More failures than standbys, and a bus that goes away: the job holds, says why, and goes on."""

import asyncio
import json
import os
import signal
from pathlib import Path

import nats
import pytest
from tests.chaos.job import Finished, Job, assert_same
from tests.integration.command import Command, carriers

MISTAKES = str(Path(__file__).parent / "scripts" / "mistakes.py")
STEPS = 12
pytestmark = [pytest.mark.concurrent, pytest.mark.timeout(240)]


def job(folder: Path, nproc: int, standbys: int, *run_args: str) -> Job:
    args = ("--folder", str(folder), "--steps", str(STEPS))
    folder.mkdir(exist_ok=True)
    return Job(
        folder, MISTAKES, nproc=nproc, standbys=standbys, script_args=args, run_args=run_args
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    with job(tmp_path_factory.mktemp("undisturbed"), 3, 0) as run:
        return run.finish()


def kill(run: Job, *ranks: int) -> None:
    for worker in [run.assignment()[rank] for rank in ranks]:
        os.kill(run.pid(worker), signal.SIGKILL)


def at_step(run: Job, step: int) -> None:
    """Every rank has done its set-up, and waits for the test before this step."""
    run.pace(step)
    run.wait_for("the start", lambda: bool(run.of("job.started")))


@pytest.mark.full
def test_without_a_standby_the_job_says_so_and_goes_on_with_a_fresh_worker(
    tmp_path: Path, undisturbed: Finished
) -> None:
    with job(tmp_path, 3, 0) as run:
        at_step(run, 3)
        (tmp_path / "blocked").touch()
        kill(run, 1)
        run.wait_for("the stall", lambda: bool(run.of("job.stalled")))
        assert not run.of("migration.planned")
        (tmp_path / "blocked").unlink()
        run.pace(6)
        run.recovered(1)
        kill(run, 0, 2)
        run.pace(STEPS)
        finished = run.finish()
        (first, *_) = run.of("job.stalled")
    assert_same(finished, undisturbed)
    assert first["reason"].startswith("rank 1 lost its worker")
    assert "a worker that registers" in first["unblocked_by"]
    assert "job.stalled: rank 1 lost its worker" in finished.output


@pytest.mark.full
def test_a_job_that_stalls_for_too_long_ends_with_3(tmp_path: Path) -> None:
    with job(tmp_path, 2, 0, "--stall-timeout=5") as run:
        at_step(run, 3)
        (tmp_path / "blocked").touch()
        kill(run, 1)
        finished = run.finish()
    assert finished.code == 3, finished.output
    assert "no standby is free, for 5 s (--stall-timeout)" in finished.output


def bus_server(run: Job) -> int:
    """Pid of the embedded nats-server."""
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text()
    for pid in map(int, children.split()):
        if Path(f"/proc/{pid}/comm").read_text().startswith("nats-server"):
            return pid
    raise AssertionError("no nats-server is a child of the run")


def bus_url(folder: Path) -> str:
    (session,) = (folder / "xdg" / "trainmover").glob("*.json")
    return str(json.loads(session.read_text())["url"])


async def publish_garbage(url: str, name: str) -> None:
    client = await nats.connect(url)
    stream = client.jetstream()
    for subject, payload in (
        ("worker.failed.v1", b"not JSON"),
        ("worker.failed.v1", b'{"job": 1}'),
        ("job.failed.v1", f'{{"job": "{name}", "run": "r", "exit_code": 9}}'.encode()),
        ("worker.milked.v1", b"{}"),
    ):
        await stream.publish(f"trainmover.{name}.{subject}", payload)
    await client.close()


@pytest.mark.full
def test_a_bus_that_is_killed_and_garbage_on_it_change_nothing(
    tmp_path: Path, undisturbed: Finished
) -> None:
    with job(tmp_path, 3, 1) as run:
        at_step(run, 2)
        os.kill(bus_server(run), signal.SIGKILL)
        run.pace(6)
        run.wait_for("steps without a bus", lambda: steps_done(tmp_path) >= 6)
        run.wait_for("the bus", lambda: "the bus is back" in run.output())
        asyncio.run(publish_garbage(bus_url(tmp_path), run.name))
        kill(run, 2)
        run.pace(8)
        run.recovered(1)
        run.pace(STEPS)
        finished = run.finish()
    assert_same(finished, undisturbed)


def steps_done(folder: Path) -> int:
    """By every rank, as their step digests say."""
    counts = [len(p.read_text().splitlines()) for p in (folder / "digests").glob("rank*.jsonl")]
    return min(counts, default=0)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_in_the_middle_of_a_recovery_leaves_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    fault = "--fault=kill:rank=1,step=2"
    script = (MISTAKES, "--folder", str(tmp_path))
    with Command(tmp_path, "--nproc-per-node", "3", fault, *script) as command:
        command.wait_for("worker.failed:")
        assert len(carriers(command.job)) > 3
        command.process.send_signal(number)
        outcome = command.finish(20)
    assert outcome.code == (-number if number is signal.SIGKILL else 128 + number)
