"""`--no-warmup`: a standby runs the script only when it gets a rank, and then all is as always."""

from pathlib import Path

import pytest

from tests.chaos.job import Job, assert_same

STEPS = 12


def job(folder: Path, *flags: str) -> Job:
    script = (f"--steps={STEPS}", f"--folder={folder}")
    return Job(folder, "everything.py", run_args=flags, script_args=script)


@pytest.mark.concurrent
@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_standby_that_did_not_warm_up_takes_over_with_the_same_bits(tmp_path: Path) -> None:
    with job(tmp_path / "undisturbed") as run:
        undisturbed = run.finish()
    with job(tmp_path / "cold", "--no-warmup") as run:
        run.pace(3)
        run.wait_for("ranks", lambda: len(run.of("rank.ready")) == 2)
        run.wait_for("a third worker", lambda: len(run.of("worker.registered")) == 3)
        run.inject(f"kill:worker={run.assignment()[1]},at=backward")
        run.pace(STEPS + 1)
        finished = run.finish()
        joined = run.of("rank.ready")[-1]
        assert not run.of("standby.warmed")
    assert (joined["generation"], joined["bound"]) == (2, "again")
    assert_same(finished, undisturbed)
