"""A rank dies at every point of a step; the end is that of a run in which nobody died."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.job import Finished, Job, assert_same
from trainmover.schemas.fault import POINTS

STEPS = 60
IN_A_STEP = tuple(p for p in POINTS if p != "end")

Undisturbed = Callable[..., Finished]


def job(
    folder: Path, nproc: int, script: str = "everything.py", *more: str, standbys: int = 1
) -> Job:
    args = (f"--steps={STEPS}", f"--folder={folder}", *more)
    return Job(folder, script, nproc=nproc, standbys=standbys, script_args=args)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The same job left alone; run once for each set of arguments."""
    known: dict[tuple[object, ...], Finished] = {}

    def get(nproc: int, script: str = "everything.py", *more: str) -> Finished:
        key = (nproc, script, *more)
        if key not in known:
            with job(tmp_path_factory.mktemp("undisturbed"), nproc, script, *more) as run:
                known[key] = run.finish()
        return known[key]

    return get


def kill_at(run: Job, points: tuple[tuple[int, str], ...], first_step: int = 2) -> None:
    """Kills (rank, point) after (rank, point), each once the next standby has parked."""
    allowed = first_step
    run.pace(allowed)
    for count, (rank, point) in enumerate(points, 1):
        run.wait_for("a parked standby", lambda: bool(run.parked()))
        run.inject(f"kill:worker={run.assignment()[rank]},at={point}")
        allowed += 3
        run.pace(allowed)
        run.recovered(count)
    run.pace(STEPS + 1)


@pytest.mark.concurrent
@pytest.mark.timeout(240)
def test_a_kill_at_every_point_of_a_step_changes_nothing(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    draw = random.Random(1)
    points = tuple((draw.randrange(2), point) for point in IN_A_STEP)
    with job(tmp_path, 2) as run:
        kill_at(run, points)
        assert_same(run.finish(), undisturbed(2))


@pytest.mark.concurrent
@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("nproc", [2, 4])
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_a_kill_of_every_rank_at_every_point_changes_nothing(
    tmp_path: Path, undisturbed: Undisturbed, nproc: int, rank: int
) -> None:
    if rank >= nproc:
        pytest.skip(f"dp={nproc} has no rank {rank}")
    with job(tmp_path, nproc) as run:
        kill_at(run, tuple((rank, point) for point in IN_A_STEP))
        assert_same(run.finish(), undisturbed(nproc))


@pytest.mark.concurrent
@pytest.mark.timeout(240)
def test_kills_in_the_first_two_steps_and_the_last_and_after_the_loop_change_nothing(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    with job(tmp_path, 4, standbys=2) as run:
        for count, (rank, step) in enumerate([(1, 0), (2, 1)], 1):
            run.pace(step)
            run.wait_for("a parked standby", lambda: bool(run.parked()))
            run.inject(f"kill:worker={run.assignment()[rank]},step={step},at=backward")
            run.pace(step + 1)
            run.recovered(count)
        run.wait_for("two parked standbys", lambda: len(run.parked()) == 2)
        run.inject(f"kill:worker={run.assignment()[0]},step={STEPS},at=vote")
        run.inject(f"kill:worker={run.assignment()[1]},step={STEPS + 1},at=end")
        run.pace(STEPS + 1)
        assert_same(run.finish(), undisturbed(4))
        assert len(run.of("worker.failed")) == 4


@pytest.mark.concurrent
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.full)])
def test_sigkills_from_outside_at_any_moment_change_nothing(
    tmp_path: Path, undisturbed: Undisturbed, kills: int
) -> None:
    draw = random.Random(kills)
    with job(tmp_path, 2) as run:
        for count in range(1, kills + 1):
            run.pace(2 * count)
            run.wait_for("a parked standby", lambda: bool(run.parked()))
            worker = run.assignment()[draw.randrange(2)]
            run.pace(2 * count + 1)
            time.sleep(draw.uniform(0, 0.15))  # the moment is the subject of this test
            os.kill(run.pid(worker), signal.SIGKILL)
            run.pace(2 * count + 2)
            run.recovered(count)
        run.pace(STEPS + 1)
        assert_same(run.finish(), undisturbed(2))


@pytest.mark.concurrent
@pytest.mark.timeout(240)
def test_stayers_keep_their_processes_and_their_sockets(tmp_path: Path) -> None:
    with job(tmp_path, 4) as run:
        run.pace(3)
        run.wait_for("a parked standby", lambda: bool(run.parked()))
        stayers = {r: w for r, w in run.assignment().items() if r != 2}
        before = {r: run.sockets(w) for r, w in stayers.items()}
        run.inject(f"kill:worker={run.assignment()[2]},at=backward")
        run.pace(6)
        run.recovered(1)
        (switched,) = run.of("migration.switched")
        for rank, worker in stayers.items():
            opened, closed, kept = switched["links"][str(rank)]
            after = run.sockets(worker)
            assert run.assignment()[rank] == worker
            assert len(before[rank] - after) == closed
            assert len(after - before[rank]) == opened
            assert len(before[rank] & after) > kept > 0
        run.pace(STEPS + 1)
        assert run.finish().code == 0


@pytest.mark.concurrent
@pytest.mark.timeout(240)
def test_a_script_that_shards_by_rank_recovers(tmp_path: Path, undisturbed: Undisturbed) -> None:
    with job(tmp_path, 2, "by_rank.py") as run:
        kill_at(run, ((1, "backward"), (0, "commit"), (1, "result"), (0, "frame")))
        assert_same(run.finish(), undisturbed(2, "by_rank.py"))


@pytest.mark.concurrent
@pytest.mark.timeout(240)
def test_loader_workers_neither_hide_a_death_nor_change_the_data(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    with job(tmp_path, 2, "everything.py", "--loader-workers=2") as run:
        kill_at(run, ((1, "forward"), (0, "optimizer")))
        finished = run.finish()
        lost = run.of("peer.lost")
    assert_same(finished, undisturbed(2, "everything.py", "--loader-workers=2"))
    assert lost, "the peer saw no end of file: a forked loader worker kept the socket open"


@pytest.mark.concurrent
@pytest.mark.timeout(240)
def test_a_broken_link_between_two_living_ranks_is_opened_again(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    with job(tmp_path, 2) as run:
        run.pace(3)
        run.wait_for("the ranks", lambda: len(run.of("rank.ready")) == 2)
        workers = run.assignment()
        run.inject(f"cut:worker={workers[1]},at=forward")
        run.pace(6)
        run.recovered(1)
        assert run.assignment() == workers
        assert run.of("migration.planned")[0]["kind"] == "relink"
        run.pace(STEPS + 1)
        assert_same(run.finish(), undisturbed(2))


@pytest.mark.concurrent
@pytest.mark.timeout(240)
def test_state_that_every_rank_lost_in_a_collective_after_the_update_ends_the_job_with_4(
    tmp_path: Path,
) -> None:
    with job(tmp_path, 2, "by_rank.py", "--mean-after-update") as run:
        run.pace(3)
        run.wait_for("a parked standby", lambda: bool(run.parked()))
        run.inject(f"kill:worker={run.assignment()[1]},at=optimizer")
        run.pace(6)
        finished = run.finish()
    assert finished.code == 4, finished.output
    assert "clean" in finished.output or "no live rank holds" in finished.output


@pytest.mark.concurrent
@pytest.mark.timeout(240)
def test_a_rebindable_script_goes_on_without_running_again(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    with job(tmp_path, 2, "everything.py", "--rebindable") as run:
        kill_at(run, ((1, "backward"), (0, "result"), (1, "commit")))
        finished = run.finish()
        bound = [e["bound"] for e in run.of("rank.ready")]
    assert bound == ["set-up"] * 2 + ["rebound"] * 3
    assert_same(finished, undisturbed(2))


@pytest.mark.concurrent
@pytest.mark.timeout(240)
def test_a_rank_that_dies_in_set_up_sends_every_rank_through_set_up_again(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    with job(tmp_path, 2, "everything.py", "--die-in-set-up") as run:
        finished = run.finish()
        (decided,) = run.of("migration.decided")
    assert decided["setup_again"]
    assert_same(finished, undisturbed(2))
