"""TrainMover's own parts die: services, their twins, the bus, an agent. The end is the same."""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.job import (
    Bus,
    Finished,
    Job,
    assert_each_decision_once,
    assert_same,
    child,
    descendants,
)
from tests.integration.command import ORPHANS_WITHIN_S

SERVICES = ("detector", "planner", "mover")
MOMENTS = (
    "fault.injected",
    "worker.exited",
    "worker.failed",
    "migration.planned",
    "migration.decided",
    "migration.switched",
)
SECRET = {"TRAINMOVER_SECRET": "5ec2e7"}
SHORT, LONG = 16, 80
PARKED_S = 120.0
"""A busy machine takes a minute to import torch and to run the first steps."""

pytestmark = [pytest.mark.concurrent, pytest.mark.timeout(300)]
Undisturbed = Callable[[int, int], Finished]


def job(folder: Path, nproc: int, steps: int, *run_args: str, standbys: int = 1) -> Job:
    args = (f"--steps={steps}", f"--folder={folder}", "--micro-batches=2")
    return Job(
        folder,
        "everything.py",
        nproc=nproc,
        standbys=standbys,
        script_args=args,
        run_args=run_args,
        variables=SECRET,
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The same job left alone, on one machine; run once for each size."""
    known: dict[tuple[int, int], Finished] = {}

    def get(ranks: int, steps: int) -> Finished:
        if (ranks, steps) not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            with job(folder, ranks, steps, standbys=0) as run:
                known[ranks, steps] = run.finish(240)
        return known[ranks, steps]

    return get


def disturb(run: Job, draw: random.Random, allowed: int, then: Callable[[], None]) -> int:
    """A rank is killed, and `then` happens at a drawn moment of the recovery, which must end well.

    Returns the step up to which the script may go afterwards.
    """
    run.wait_for("a parked standby", lambda: bool(run.parked()), PARKED_S)
    leaver = run.assignment()[draw.randrange(len(run.assignment()))]
    moment = draw.choice(MOMENTS)
    seen = len(run.of(moment)) + 1
    run.inject(f"kill:worker={leaver},at={draw.choice(('backward', 'vote', 'result'))}")
    run.pace(allowed + 2)
    run.wait_for(moment, partial(run.happened, moment, seen))
    time.sleep(draw.uniform(0, 0.1))  # the moment is the subject of this test
    then()
    run.wait_for("recovery", partial(run.settled_without, {leaver}), 60)
    return allowed + 2


def kill_service(parent: int, name: str) -> None:
    os.kill(child(parent, f"trainmover.services.{name}"), signal.SIGKILL)


# ---- services


def kill_services(run: Job, names: tuple[str, ...], draw: random.Random) -> None:
    """Each name dies in a recovery of its own."""
    allowed = 1
    run.pace(allowed)
    for name in names:
        allowed = disturb(run, draw, allowed, partial(kill_service, run.process.pid, name))
    again = "service is started again"
    # the recovery may be over before `run` has seen that its child is dead
    run.wait_for("every restart", lambda: run.output().count(again) >= len(names))
    assert run.output().count(again) == len(names)
    assert_each_decision_once(run)


def test_each_service_killed_in_the_middle_of_a_recovery_changes_nothing(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    with job(tmp_path, 2, SHORT) as run:
        kill_services(run, SERVICES, random.Random(1))
        run.pace(SHORT + 1)
        assert_same(run.finish(), undisturbed(2, SHORT))


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SERVICES)
def test_a_service_killed_at_twenty_moments_of_recoveries_changes_nothing(
    tmp_path: Path, undisturbed: Undisturbed, name: str
) -> None:
    with job(tmp_path, 2, LONG) as run:
        kill_services(run, (name,) * 20, random.Random(name))
        run.pace(LONG + 1)
        assert_same(run.finish(), undisturbed(2, LONG))


# ---- two copies of each, and the bus


def steps_done(folder: Path) -> int:
    """By every rank, as their step digests say."""
    counts = [len(p.read_text().splitlines()) for p in (folder / "digests").glob("rank*.jsonl")]
    return min(counts, default=0)


def goes_on_without(run: Job, bus: Bus, steps: int) -> None:
    """Training advances to `steps` while the bus is down."""
    bus.kill()
    run.pace(steps)
    run.wait_for("steps without a bus", lambda: steps_done(run.folder) >= steps)
    bus.start()


def restart(bus: Bus, down_s: float = 0) -> None:
    bus.kill()
    time.sleep(down_s)  # how long it is away is the subject of this test
    bus.start()


def ended(run: Job, machines: ExitStack) -> Finished:
    """Its end, once all that was beside it is ended as well."""
    run.process.wait(60)
    assert_each_decision_once(run)
    machines.close()
    return run.finish()


def test_two_copies_of_every_service_and_a_bus_that_restarts_decide_once(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    draw = random.Random(2)
    with ExitStack() as beside:
        bus = beside.enter_context(Bus(tmp_path / "bus"))
        with job(tmp_path, 2, SHORT, f"--bus={bus.url}") as run:
            copies = [beside.enter_context(run.services(bus.url, copy)) for copy in "ab"]
            run.pace(1)
            run.wait_for("a parked standby", lambda: bool(run.parked()), PARKED_S)
            goes_on_without(run, bus, 5)
            allowed = disturb(run, draw, 5, partial(restart, bus))
            disturb(run, draw, allowed, copies[draw.randrange(2)].kill)
            run.pace(SHORT + 1)
            assert_same(ended(run, beside), undisturbed(2, SHORT))


@pytest.mark.full
@pytest.mark.timeout(600)
def test_either_copy_of_every_service_may_die_in_any_recovery(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    draw, allowed = random.Random(3), 1
    with ExitStack() as beside:
        bus = beside.enter_context(Bus(tmp_path / "bus"))
        with job(tmp_path, 2, LONG, f"--bus={bus.url}") as run:
            copies = [beside.enter_context(run.services(bus.url, f"-{n}")) for n in range(2)]
            run.pace(allowed)
            for n in range(2, 12):
                allowed = disturb(run, draw, allowed, copies.pop(draw.randrange(2)).kill)
                copies.append(beside.enter_context(run.services(bus.url, f"-{n}")))
            run.pace(LONG + 1)
            assert_same(ended(run, beside), undisturbed(2, LONG))


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("longest_s", [0, 8])
def test_a_bus_killed_at_any_moment_of_a_recovery_loses_nothing(
    tmp_path: Path, undisturbed: Undisturbed, longest_s: float
) -> None:
    draw, allowed = random.Random(4), 1
    with ExitStack() as beside:
        bus = beside.enter_context(Bus(tmp_path / "bus"))
        with job(tmp_path, 2, LONG, f"--bus={bus.url}") as run:
            beside.enter_context(run.services(bus.url))
            run.pace(allowed)
            for _ in range(15):
                away = partial(restart, bus, draw.uniform(0, longest_s))
                allowed = disturb(run, draw, allowed, away)
            run.pace(LONG + 1)
            assert_same(ended(run, beside), undisturbed(2, LONG))
            assert all(e["kind"] == "crash" for e in run.of("worker.failed"))


# ---- an agent


@pytest.mark.parametrize(
    ("nproc", "and_rank"),
    [
        (1, False),
        pytest.param(2, False, marks=[pytest.mark.full]),
        pytest.param(2, True, marks=[pytest.mark.full]),
    ],
)
def test_a_machine_whose_agent_dies_is_replaced_in_one_incident(
    tmp_path: Path, undisturbed: Undisturbed, nproc: int, and_rank: bool
) -> None:
    with ExitStack() as beside:
        bus = beside.enter_context(Bus(tmp_path / "bus"))
        two = (f"--bus={bus.url}", "--nnodes=2", "--machine=a")
        with job(tmp_path, nproc, SHORT, *two, standbys=nproc) as run:
            lost = beside.enter_context(run.machine("b"))
            beside.enter_context(run.services(bus.url))
            run.pace(3)
            run.wait_for("its standbys", lambda: len(run.parked()) == 2 * nproc, PARKED_S)
            run.wait_for("the start", lambda: bool(run.of("job.started")))
            ranks, processes = run.assignment(), descendants(lost.pid)
            gone = {worker for worker in ranks.values() if worker.startswith("b-")}
            assert len(gone) == nproc
            assert len(processes) > len(gone)
            if and_rank:
                os.kill(run.pid(ranks[2 * nproc - 1]), signal.SIGKILL)
            lost.kill()
            run.pace(6)
            run.wait_for("recovery", partial(run.settled_without, gone), 60)
            assert_gone(processes)
            assert {e["incident"] for e in run.of("migration.planned")} == {"g2"}
            assert all(worker.startswith("a-") for worker in run.assignment().values())
            run.pace(SHORT + 1)
            assert_same(ended(run, beside), undisturbed(2 * nproc, SHORT))


def assert_gone(processes: set[int]) -> None:
    deadline = time.monotonic() + ORPHANS_WITHIN_S
    while left := [pid for pid in processes if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"orphans: {left}"
        time.sleep(0.05)
