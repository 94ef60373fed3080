"""A joiner dies while the others open their links to it: they obey the next plan at once."""

import os
import signal
from pathlib import Path

import pytest

from tests.chaos.job import Job, assert_each_decision_once, assert_same
from trainmover.runtime.recovery import SWITCH_S

STEPS = 30

pytestmark = [pytest.mark.full, pytest.mark.concurrent, pytest.mark.timeout(200)]


def job(folder: Path, script: str, standbys: int) -> Job:
    args = (f"--steps={STEPS}", f"--folder={folder}")
    return Job(folder, script, nproc=3, standbys=standbys, script_args=args)


def test_a_joiner_that_dies_in_its_switch_costs_no_deadline_and_no_bit(tmp_path: Path) -> None:
    with job(tmp_path / "alone", "everything.py", standbys=0) as run:
        alone = run.finish()
    with job(tmp_path / "killed", "dies_in_switch.py", standbys=2) as run:
        run.pace(3)
        run.wait_for("parked standbys", lambda: len(run.parked()) >= 2)
        os.kill(run.pid(run.assignment()[1]), signal.SIGKILL)
        run.pace(STEPS + 1)
        run.recovered(1)
        finished = run.finish()
        assert_each_decision_once(run)
    assert_same(finished, alone)
    (incident,) = finished.report["incidents"]
    assert incident["generations"] == [2, 3]
    assert len(incident["failures"]) == 2
    assert incident["downtime_s"] < SWITCH_S / 2
