"""Deaths in shadow steps of a set-up: every rank is set up again, and no bit differs."""

from pathlib import Path

import pytest

from tests.chaos.job import Job, assert_same

STEPS = 8

pytestmark = [pytest.mark.full, pytest.mark.concurrent, pytest.mark.timeout(200)]


def job(folder: Path, script: str, standbys: int) -> Job:
    args = (f"--steps={STEPS}", f"--folder={folder}")
    return Job(folder, script, nproc=3, standbys=standbys, script_args=args)


def test_deaths_in_shadow_steps_and_between_them_set_every_rank_up_again(tmp_path: Path) -> None:
    with job(tmp_path / "alone", "everything.py", standbys=0) as run:
        alone = run.finish()
    with job(tmp_path / "killed", "dies_in_shadow.py", standbys=1) as run:
        finished = run.finish()
        decided, ready = run.of("migration.decided"), run.of("rank.ready")
    assert [e["setup_again"] for e in decided] == [True, True]
    assert sorted(e["rank"] for e in ready) == [0, 1, 2]
    assert_same(finished, alone)
