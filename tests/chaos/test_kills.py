"""A rank dies at every point of a step; the end is that of a run in which nobody died."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.job import Finished, Job, assert_same
from trainmover.schemas.fault import POINTS

STEPS = 60


def job(folder: Path, nproc: int, **more: object) -> Job:
    args = (f"--steps={STEPS}", f"--folder={folder}")
    return Job(folder, "everything.py", nproc=nproc, script_args=args, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    with job(tmp_path_factory.mktemp("undisturbed"), 2) as run:
        yield run.finish()


@pytest.mark.concurrent
@pytest.mark.timeout(300)
def test_a_kill_at_every_point_of_a_step_changes_nothing(
    tmp_path: Path, undisturbed: Finished
) -> None:
    draw = random.Random(1)
    with job(tmp_path, 2) as run:
        run.pace(2)
        allowed = 2
        for count, point in enumerate(POINTS[:-1], 1):
            run.wait_for("a parked standby", lambda: bool(run.parked()))
            worker = run.assignment()[draw.randrange(2)]
            run.inject(f"kill:worker={worker},at={point}")
            allowed += 4
            run.pace(allowed)
            run.wait_for(
                f"recovery {count} ({point})",
                lambda count=count: len(run.of("migration.completed")) >= count,
            )
        run.pace(STEPS + 1)
        assert_same(run.finish(), undisturbed)
