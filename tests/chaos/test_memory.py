"""A recovery, or a move, takes no memory that a plain step does not take."""

import json
import time
from pathlib import Path

import pytest

from tests.chaos.job import Job
from tests.chaos.test_planned import moved

SCRIPT, PLAIN_TO, RECOVERED, MOVED = "heavy.py", 25, 30, 40
STATE_BYTES = 195_000_000
ALLOWED_MIB = 8.0
LIMIT_S = 90.0


class Undigested(Job):
    """Without a digest of all state after each step, which takes longer than the step."""

    def _run(self, *more: str) -> tuple[str, ...]:
        return tuple(a for a in super()._run(*more) if not a.startswith("--step-digests"))


def peaks(folder: Path, rank: int, step: int) -> dict[str, float]:
    """What the rank's process has read, by step; blocks until `step` is among it."""
    path = folder / f"peak{rank}.json"
    deadline = time.monotonic() + LIMIT_S
    while True:
        found: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
        if str(step) in found:
            return found
        assert time.monotonic() < deadline, f"rank {rank} was not read at step {step}: {found}"
        time.sleep(0.02)


@pytest.mark.concurrent
def test_donors_and_stayers_of_200_mb_take_no_more_memory_than_in_plain_steps(
    tmp_path: Path,
) -> None:
    with Undigested(tmp_path, SCRIPT, script_args=(f"--folder={tmp_path}",)) as run:
        run.pace(PLAIN_TO)
        for rank in (0, 1):
            peaks(tmp_path, rank, PLAIN_TO)
        run.wait_for("a parked standby", lambda: bool(run.parked()))
        run.inject(f"kill:worker={run.assignment()[1]},at=forward")
        run.pace(RECOVERED)
        run.recovered(1)
        peaks(tmp_path, 0, RECOVERED)
        moved(run, (1,), RECOVERED)
        run.pace(MOVED + 3)
        read = peaks(tmp_path, 0, MOVED)
        end = run.finish()
    assert end.code == 0, end.output[-6000:]
    for event in run.of("migration.switched"):
        (restored,) = event["restored"]
        assert restored["num_bytes"] > STATE_BYTES
    for step in (RECOVERED, MOVED):  # rank 0 is the donor of the first, and stays in the second
        assert read[str(step)] - read[str(PLAIN_TO)] <= ALLOWED_MIB, read
