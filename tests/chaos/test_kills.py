"""A rank dies at every point of a step; the end is that of a run in which nobody died."""

import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
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


def kill_at(run: Job, points: tuple[tuple[int, str], ...], allowed: int = 2) -> int:
    """Kills (rank, point) after (rank, point), each once the next standby has parked.

    Returns the step up to which the script may go afterwards.
    """
    done = len(run.of("migration.completed"))
    run.pace(allowed)
    for count, (rank, point) in enumerate(points, done + 1):
        run.wait_for("a parked standby", lambda: bool(run.parked()))
        run.inject(f"kill:worker={run.assignment()[rank]},at={point}")
        allowed += 3
        run.pace(allowed)
        run.recovered(count)
    return allowed


def kill_from_outside(run: Job, kills: int, draw: random.Random, allowed: int) -> int:
    """SIGKILLs at moments that the seed draws; returns as `kill_at`."""
    done = len(run.of("migration.completed"))
    run.pace(allowed)
    for count in range(done + 1, done + kills + 1):
        run.wait_for("a parked standby", lambda: bool(run.parked()))
        worker = run.assignment()[draw.randrange(2)]
        run.pace(allowed + 1)
        time.sleep(draw.uniform(0, 0.15))  # the moment is the subject of this test
        os.kill(run.pid(worker), signal.SIGKILL)
        allowed += 2
        run.pace(allowed)
        run.recovered(count)
    return allowed


def cut_a_link(run: Job, allowed: int) -> int:
    """A link between living ranks breaks: the same workers go on; returns as `kill_at`."""
    done, workers = len(run.of("migration.completed")), run.assignment()
    run.inject(f"cut:worker={workers[1]},at=forward")
    run.pace(allowed + 3)
    run.recovered(done + 1)
    assert run.assignment() == workers
    assert run.of("migration.planned")[-1]["kind"] == "relink"
    return allowed + 3


@pytest.mark.concurrent
@pytest.mark.timeout(240)
def test_kills_at_every_point_and_from_outside_and_a_broken_link_change_nothing(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    draw = random.Random(1)
    points = tuple((draw.randrange(2), point) for point in IN_A_STEP)
    with job(tmp_path, 2) as run:
        allowed = kill_at(run, points)
        allowed = cut_a_link(run, allowed)
        kill_from_outside(run, 3, draw, allowed)
        run.pace(STEPS + 1)
        assert_same(run.finish(), undisturbed(2))


@pytest.mark.concurrent
@pytest.mark.timeout(240)
def test_kills_in_the_first_steps_and_the_last_and_after_the_loop_leave_stayers_as_they_are(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    with job(tmp_path, 4, standbys=2) as run:
        for count, (rank, step) in enumerate([(1, 0), (2, 1)], 1):
            run.pace(step)
            run.wait_for("a parked standby", lambda: bool(run.parked()))
            run.wait_for("four ranks", lambda: len(run.of("rank.ready")) >= 4)
            stayers = {r: w for r, w in run.assignment().items() if r != rank}
            before = {r: run.sockets(w) for r, w in stayers.items()}
            run.inject(f"kill:worker={run.assignment()[rank]},step={step},at=backward")
            run.pace(step + 1)
            run.recovered(count)
            assert_stayers_kept_their_sockets(run, stayers, before)
        run.wait_for("two parked standbys", lambda: len(run.parked()) == 2)
        run.inject(f"kill:worker={run.assignment()[0]},step={STEPS},at=vote")
        run.inject(f"kill:worker={run.assignment()[1]},step={STEPS + 1},at=end")
        run.pace(STEPS + 1)
        assert_same(run.finish(), undisturbed(4))
        assert len(run.of("worker.failed")) == 4


def assert_stayers_kept_their_sockets(
    run: Job, stayers: dict[int, str], before: dict[int, set[str]]
) -> None:
    """The kernel's inodes say what the switch says that it opened, closed and kept."""
    switched = run.of("migration.switched")[-1]
    for rank, worker in stayers.items():
        opened, closed, kept = switched["links"][str(rank)]
        after = run.sockets(worker)
        assert run.assignment()[rank] == worker
        assert len(before[rank] - after) == closed > 0
        assert len(after - before[rank]) == opened > 0
        assert len(before[rank] & after) > kept > 0


@pytest.mark.concurrent
@pytest.mark.full
@pytest.mark.timeout(240)
def test_every_replica_gives_a_stripe_to_who_takes_the_rank_of_a_dead_one(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    more = ("--frozen-mb=24",)
    with job(tmp_path, 4, "everything.py", *more) as run:
        allowed = kill_at(run, ((2, "forward"), (0, "vote")))
        pulls = [
            (one, run.of("migration.planned")[i]["members"])
            for i, event in enumerate(run.of("migration.switched"))
            for one in event["restored"]
            if one["num_bytes"]
        ]
        run.pace(max(allowed, STEPS + 1))
        assert_same(run.finish(), undisturbed(4, "everything.py", *more))
    assert len(pulls) == 2
    for one, members in pulls:
        replicas = {m["worker"] for m in members if m["rank"] != one["rank"]}
        assert set(one["donors"]) <= replicas
        assert sum(count > 1_000_000 for count in one["donors"].values()) >= 2, one
        assert sum(one["donors"].values()) == one["num_bytes"] > 24_000_000


@pytest.mark.concurrent
@pytest.mark.timeout(240)
def test_a_rebindable_script_goes_on_without_running_again(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    with job(tmp_path, 2, "everything.py", "--rebindable") as run:
        kill_at(run, ((1, "forward"), (0, "result"), (1, "optimizer")))
        run.pace(STEPS + 1)
        finished = run.finish()
        bound = [e["bound"] for e in run.of("rank.ready")]
    assert bound == ["set-up"] * 2 + ["rebound"] * 3
    assert_same(finished, undisturbed(2))


@pytest.mark.concurrent
@pytest.mark.timeout(240)
@pytest.mark.full
def test_a_rank_that_dies_in_set_up_sends_every_rank_through_set_up_again(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    with job(tmp_path, 2, "everything.py", "--die-in-set-up") as run:
        finished = run.finish()
        (decided,) = run.of("migration.decided")
    assert decided["setup_again"]
    assert_same(finished, undisturbed(2))


# ---- the full matrices


@pytest.mark.concurrent
@pytest.mark.full
@pytest.mark.timeout(240)
def test_loader_workers_neither_hide_a_death_nor_change_the_data(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    with job(tmp_path, 2, "everything.py", "--loader-workers=2") as run:
        kill_at(run, ((1, "forward"), (0, "optimizer"), (1, "between"), (0, "forward")))
        run.pace(STEPS + 1)
        finished = run.finish()
        lost = run.of("peer.lost")
    assert lost, "the peer saw no end of file: a forked loader worker kept the socket open"
    assert_same(finished, undisturbed(2, "everything.py", "--loader-workers=2"))


@pytest.mark.concurrent
@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_stop_whose_vote_was_cut_off_ends_the_loop_on_every_rank(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """Rank 3 hears results from rank 1, which dies with the one that carries the stop: it learns
    of the commit from the decision, or from the extras of a rank that is a step ahead (XKNOW)."""
    with job(tmp_path, 4, "everything.py", "--stop-at=5") as run:
        run.pace(2)
        run.wait_for("a parked standby", lambda: bool(run.parked()))
        run.wait_for("four ranks", lambda: len(run.of("rank.ready")) == 4)
        run.inject(f"kill:worker={run.assignment()[1]},step=5,at=result")
        run.pace(STEPS + 1)
        finished = run.finish()
        assert len(run.of("migration.completed")) == 1
    left_alone = undisturbed(4, "everything.py", "--stop-at=5")
    assert finished.report["completed_steps"] == left_alone.report["completed_steps"] == 6
    # Not step by step: rank 3 learns of the end of the loop after it has noted its digest.
    assert finished.state == left_alone.state, finished.output


@pytest.mark.concurrent
@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("nproc", "rank"), [(2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (4, 3)])
def test_a_kill_of_every_rank_at_every_point_changes_nothing(
    tmp_path: Path, undisturbed: Undisturbed, nproc: int, rank: int
) -> None:
    with job(tmp_path, nproc) as run:
        kill_at(run, tuple((rank, point) for point in IN_A_STEP))
        run.pace(STEPS + 1)
        assert_same(run.finish(), undisturbed(nproc))


@pytest.mark.concurrent
@pytest.mark.full
@pytest.mark.timeout(600)
def test_twenty_sigkills_from_outside_at_any_moment_change_nothing(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    with job(tmp_path, 2) as run:
        kill_from_outside(run, 20, random.Random(20), 1)
        run.pace(STEPS + 1)
        assert_same(run.finish(), undisturbed(2))


@pytest.mark.concurrent
@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_script_that_shards_by_rank_recovers(tmp_path: Path, undisturbed: Undisturbed) -> None:
    with job(tmp_path, 2, "by_rank.py") as run:
        kill_at(run, ((1, "backward"), (0, "commit"), (1, "result"), (0, "frame")))
        run.pace(STEPS + 1)
        assert_same(run.finish(), undisturbed(2, "by_rank.py"))


@pytest.mark.concurrent
@pytest.mark.full
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
    assert "collective.after_the_update" in finished.output
    assert "no live rank holds" in finished.output


@pytest.mark.concurrent
@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["joiner", "stayer"])
@pytest.mark.parametrize("moment", ["migration.planned", "migration.decided", "migration.switched"])
def test_a_second_death_in_the_middle_of_a_recovery_changes_nothing(
    tmp_path: Path, undisturbed: Undisturbed, moment: str, victim: str
) -> None:
    with job(tmp_path, 4, standbys=3) as run:
        run.pace(2)
        for count, rank in enumerate((1, 0, 3), 1):
            run.wait_for("three parked standbys", lambda: len(run.parked()) == 3)
            leaver = run.assignment()[rank]
            seen = len(run.of(moment)) + 1
            run.inject(f"kill:worker={leaver},at=result")
            run.pace(4 * count + 2)
            run.wait_for(moment, partial(run.happened, moment, seen))
            second = run.assignment()[rank if victim == "joiner" else (rank + 2) % 4]
            os.kill(run.pid(second), signal.SIGKILL)
            run.wait_for("recovery", partial(run.settled_without, {leaver, second}), 90)
        run.pace(STEPS + 1)
        assert_same(run.finish(), undisturbed(4))


@pytest.mark.concurrent
@pytest.mark.full
@pytest.mark.timeout(240)
def test_state_that_a_script_forgot_to_track_is_named_after_the_first_recovery(
    tmp_path: Path,
) -> None:
    with job(tmp_path, 2, "by_rank.py", "--hidden-schedule") as run:
        run.pace(10)
        run.wait_for("a parked standby", lambda: bool(run.parked()))
        run.inject(f"kill:worker={run.assignment()[1]},step=10,at=backward")
        run.pace(STEPS)
        finished = run.finish()
    assert finished.code == 1, finished.output
    assert "ranks that should hold the same differ in optimizer" in finished.output
