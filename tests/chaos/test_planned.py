"""A rank moves to a standby while training goes on: nothing is done twice, the bits are equal."""

import os
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.job import Finished, Job, assert_each_decision_once, assert_same
from tests.chaos.test_parallel import LAYOUTS, parallel
from tests.chaos.test_parallel import STEPS as SHARDED_STEPS

STEPS = 100

pytestmark = [pytest.mark.concurrent, pytest.mark.timeout(300)]


def job(folder: Path, nproc: int, standbys: int = 1) -> Job:
    args = (f"--steps={STEPS}", f"--folder={folder}")
    return Job(folder, "everything.py", nproc=nproc, standbys=standbys, script_args=args)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    with job(tmp_path_factory.mktemp("undisturbed"), 2) as run:
        return run.finish()


def announce(run: Job, *ranks: int) -> "subprocess.Popen[bytes]":
    """`trainmover migrate` of these ranks; it ends when they have moved or cannot."""
    with (run.folder / "migrate").open("a") as output:
        given = [word for rank in ranks for word in ("--rank", str(rank))]
        return run.start("migrate", "--job", run.name, *given, output=output)


def phase_of(run: Job, phase: str, generation: int) -> bool:
    return any(e["generation"] == generation for e in run.of(f"migration.{phase}"))


def moved(run: Job, ranks: tuple[int, ...], allowed: int) -> int:
    """Moves `ranks` as one, nothing in their way; returns up to which step the script may go."""
    run.wait_for("parked standbys", lambda: len(run.parked()) >= len(ranks))
    before, plans = run.assignment(), len(run.of("migration.prepared"))
    leavers = {before[rank] for rank in ranks}
    mover = announce(run, *ranks)
    run.pace(allowed + 3)  # training goes on while the joiners get ready
    run.wait_for("prepared joiners", lambda: run.happened("migration.prepared", plans + 1))
    run.pace(allowed + 6)
    run.wait_for("the move", lambda: run.settled_without(leavers))
    assert mover.wait(20) == 0, (run.folder / "migrate").read_text()
    after = run.assignment()
    assert {r for r in before if before[r] != after[r]} == set(ranks)
    run.wait_for("the leavers' ends", lambda: None not in {code_of(run, w) for w in leavers})
    assert {code_of(run, worker) for worker in leavers} == {0}
    return allowed + 6


def code_of(run: Job, worker: str) -> int | None:
    exits = (one for e in run.of("worker.exited") for one in e["exits"])
    return next((int(one["code"]) for one in exits if one["worker"] == worker), None)


def killed_in(run: Job, victim: str, phase: str, allowed: int) -> int:
    """A move of rank 1 in whose `phase` a worker is killed; returns as `moved`."""
    run.wait_for("two parked standbys", lambda: len(run.parked()) >= 2)
    mover, old = announce(run, 1), run.assignment()
    plans = len(run.of("migration.planned"))
    run.wait_for("a plan", lambda: run.happened("migration.planned", plans + 1))
    plan = run.of("migration.planned")[-1]
    (move,) = plan["replacements"]
    worker = {"leaver": move["leaver"], "joiner": move["joiner"], "stayer": old[0]}[victim]
    if phase != "planned":
        prepared = partial(phase_of, run, "prepared", plan["generation"])
        run.wait_for("a prepared joiner", prepared)
        run.pace(allowed + 6)
        run.wait_for(phase, lambda: phase_of(run, phase, plan["generation"]))
    os.kill(run.pid(worker), signal.SIGKILL)

    def moved() -> bool:
        """Each plan that is prepared gets a step at whose end it can be switched to."""
        prepared = len(run.of("migration.prepared"))
        run.pace(allowed + 6 + 3 * prepared)
        return run.settled_without({old[1], worker})

    run.wait_for("rank 1 to move", moved, 90)
    mover.wait(30)
    return allowed + 6 + 3 * len(run.of("migration.prepared"))


def test_a_move_of_each_rank_and_of_all_costs_no_step_and_leaves_the_others(
    tmp_path: Path, undisturbed: Finished
) -> None:
    with job(tmp_path, 2, standbys=2) as run:
        run.pace(3)
        stayer = None
        allowed = 3
        for rank in (1, 0):
            run.wait_for("a parked standby", lambda: bool(run.parked()))
            stayer = run.assignment()[1 - rank]
            allowed = moved(run, (rank,), allowed)
            assert run.assignment()[1 - rank] == stayer
        moved(run, (0, 1), allowed)
        run.pace(STEPS + 1)
        finished = run.finish()
        assert_each_decision_once(run)
    assert not run.of("step.aborted")
    assert not run.of("worker.failed")
    assert [i["kind"] for i in finished.report["incidents"]] == ["planned"] * 3
    assert [i["lost_steps"] for i in finished.report["incidents"]] == [0, 0, 0]
    assert_same(finished, undisturbed)


def test_a_death_in_the_middle_of_a_move_changes_nothing(
    tmp_path: Path, undisturbed: Finished
) -> None:
    with job(tmp_path, 2, standbys=2) as run:
        run.pace(3)
        allowed = killed_in(run, "joiner", "planned", 3)
        allowed = killed_in(run, "leaver", "prepared", allowed)
        killed_in(run, "joiner", "decided", allowed)
        run.pace(STEPS + 1)
        assert_same(run.finish(), undisturbed)
        assert_each_decision_once(run)


def test_a_shard_that_no_other_rank_holds_moves_with_its_rank(tmp_path: Path) -> None:
    fsdp = partial(parallel, parallelism="fsdp", layout="dp_shard=4")
    with fsdp(tmp_path / "alone", standbys=0) as run:
        alone = run.finish()
    with fsdp(tmp_path / "moved") as run:
        run.pace(3)
        moved(run, (2,), 3)
        run.pace(SHARDED_STEPS + 1)
        assert_same(run.finish(), alone)


@pytest.mark.full
@pytest.mark.parametrize("parallelism", sorted(LAYOUTS))
def test_two_ranks_move_as_one_under_every_parallelism(tmp_path: Path, parallelism: str) -> None:
    job_of = partial(parallel, parallelism=parallelism, layout=LAYOUTS[parallelism])
    with job_of(tmp_path / "alone", standbys=0) as run:
        alone = run.finish()
    with job_of(tmp_path / "moved", standbys=2) as run:
        run.pace(3)
        moved(run, (1, 2), 3)
        run.pace(SHARDED_STEPS + 1)
        assert_same(run.finish(), alone)


@pytest.mark.full
@pytest.mark.parametrize("victim", ["leaver", "joiner", "stayer"])
def test_a_death_of_anybody_in_any_phase_of_a_move_changes_nothing(
    tmp_path: Path, undisturbed: Finished, victim: str
) -> None:
    with job(tmp_path, 2, standbys=2) as run:
        allowed = 3
        run.pace(allowed)
        for phase in ("planned", "prepared", "decided", "switched"):
            allowed = killed_in(run, victim, phase, allowed)
        run.pace(STEPS + 1)
        assert_same(run.finish(), undisturbed)
        assert_each_decision_once(run)
