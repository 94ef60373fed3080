"""pp=2,dp=2 by send and recv: whichever rank dies, the end is that of an undisturbed run."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.job import Finished, Job, assert_same
from tests.chaos.test_kills import IN_A_STEP, kill_at

STEPS = 32
WIDE = ("--width=4096", "--batch=32")
"""512 KiB of activations: two frames, more than a socket buffers."""

Undisturbed = Callable[..., Finished]

pytestmark = [pytest.mark.concurrent, pytest.mark.timeout(300)]


def pipeline(folder: Path, *more: str, standbys: int = 1) -> Job:
    return Job(
        folder,
        "pipeline.py",
        nproc=4,
        standbys=standbys,
        script_args=(f"--steps={STEPS}", f"--folder={folder}", *more),
        run_args=("--layout=pp=2,dp=2",),
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The same job left alone; run once for each set of arguments."""
    known: dict[tuple[str, ...], Finished] = {}

    def get(*more: str) -> Finished:
        if more not in known:
            with pipeline(tmp_path_factory.mktemp("undisturbed"), *more) as run:
                known[more] = run.finish()
        return known[more]

    return get


def test_a_kill_of_every_rank_of_a_pipeline_changes_nothing(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    with pipeline(tmp_path, standbys=2) as run:
        kill_at(run, ((0, "backward"), (3, "frame"), (1, "vote"), (2, "forward")))
        run.pace(STEPS + 1)
        finished = run.finish()
        bound = [e["bound"] for e in run.of("rank.ready")]
    assert bound == ["set-up"] * 4 + ["again"] * 4
    assert_same(finished, undisturbed())


@pytest.mark.full
@pytest.mark.parametrize("rank", range(4))
def test_a_kill_of_every_rank_of_a_pipeline_at_every_point_changes_nothing(
    tmp_path: Path, undisturbed: Undisturbed, rank: int
) -> None:
    with pipeline(tmp_path) as run:
        kill_at(run, tuple((rank, point) for point in IN_A_STEP))
        run.pace(STEPS + 1)
        assert_same(run.finish(), undisturbed())


@pytest.mark.full
def test_sigkills_at_any_moment_of_long_sends_change_nothing(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    draw = random.Random(8)
    with pipeline(tmp_path, *WIDE) as run:
        run.pace(2)
        for count in range(1, 9):
            run.wait_for("a parked standby", lambda: bool(run.parked()))
            worker = run.assignment()[draw.randrange(4)]
            run.pace(3 * count)
            time.sleep(draw.uniform(0, 0.2))  # the moment is the subject of this test
            os.kill(run.pid(worker), signal.SIGKILL)
            run.pace(3 * count + 1)
            run.recovered(count)
        run.pace(STEPS + 1)
        assert_same(run.finish(), undisturbed(*WIDE))
