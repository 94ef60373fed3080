"""One script, started by python, by torchrun and by trainmover, comes to the same bits."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.integration import command

SCRIPT = str(Path(__file__).parent / "scripts" / "everywhere.py")
STEPS = 26
"""The script stops itself after so many."""
SAME = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
"""What `trainmover run` sets for its workers."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")

pytestmark = [pytest.mark.concurrent, pytest.mark.timeout(180)]


@dataclass(frozen=True)
class Ran:
    output: str
    ranks: list[list[str]]
    """For each rank what it wrote: a line for each step, and a digest of its model."""

    @property
    def state(self) -> str:
        found = re.findall(r"^trainmover: completed: (.*)$", self.output, re.M)
        assert len(found) == 1, self.output
        return str(found[0])


def by_python(folder: Path, *launcher: str) -> Ran:
    done = subprocess.run(
        [sys.executable, *launcher, SCRIPT, "--folder", str(folder)],
        env={**os.environ, **SAME},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    return Ran(done.stdout, written(folder))


def by_trainmover(folder: Path, nproc: int) -> Ran:
    arguments = (f"--nproc-per-node={nproc}", "--standbys=0", SCRIPT, "--folder", str(folder))
    outcome = command.run(folder, *arguments)
    assert outcome.code == 0, outcome.output
    return Ran(outcome.output, written(folder))


def written(folder: Path) -> list[list[str]]:
    return [path.read_text().splitlines() for path in sorted(folder.glob("rank*"))]


@pytest.mark.full
def test_one_rank_of_python_and_of_trainmover_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    alone, job = by_python(tmp_path), by_trainmover(tmp_path / "job", 1)
    assert [len(lines) for lines in alone.ranks] == [STEPS + 1]
    assert alone.ranks == job.ranks
    assert alone.state == job.state
    assert alone.state.startswith(f"{STEPS} steps")


def test_two_ranks_of_torchrun_and_of_trainmover_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    plain, job = by_python(tmp_path, *TORCHRUN), by_trainmover(tmp_path / "job", 2)
    assert [len(lines) for lines in plain.ranks] == [STEPS + 1] * 2
    assert plain.ranks == job.ranks
    assert plain.state == job.state
    assert plain.output.count("unprotected") == 1  # rank 0 says it
    assert "trainmover: 2 plain ranks, unprotected" in plain.output
    first, second = plain.ranks
    assert first[-1] != second[-1]  # batch norm's averages are of a rank's own
    last = [[float.fromhex(word) for word in r[-2].split()[2:]] for r in plain.ranks]
    loss, noise = (last[0][0] + last[1][0]) / 2, last[1][1]
    assert f"trainmover: step {STEPS} loss {loss:.4g} noise {noise:.4g}\n" in plain.output
