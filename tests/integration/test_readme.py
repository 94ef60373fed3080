"""What the documents tell people to run is run: the README's script, a watcher from outside."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.chaos.job import Finished, Job

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 200

pytestmark = [pytest.mark.concurrent, pytest.mark.timeout(180)]


@dataclass(frozen=True)
class Ran:
    finished: Finished
    watched: str


def example(document: str) -> str:
    """The one python block of a document."""
    (script,) = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S)
    return str(script)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The README's script with rank 1 killed in step 50, watched from outside."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "train.py").write_text(example("README.md"))
    (folder / "watch.py").write_text(example("docs/operations.md"))
    (folder / "faults").write_text("kill:rank=1,step=50,at=backward\n")
    with Job(folder, str(folder / "train.py")) as job:
        job.wait_for("the submission", lambda: bool(job.of("job.submitted")))
        session = json.loads((folder / "xdg" / "trainmover" / f"{job.name}.json").read_text())
        known = {f"TRAINMOVER_{k.upper()}": session[k] for k in ("job", "secret")}
        watcher = subprocess.run(
            [sys.executable, str(folder / "watch.py")],
            env={**os.environ, **known, "TRAINMOVER_BUS": session["url"]},
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
        )
        return Ran(job.finish(), watcher.stdout)


@pytest.mark.full
def test_the_script_of_the_readme_survives_a_kill(ran: Ran) -> None:
    assert ran.finished.code == 0, ran.finished.output
    assert ran.finished.report["completed_steps"] == NUM_STEPS
    (incident,) = ran.finished.report["incidents"]
    assert (incident["outcome"], incident["ranks"]) == ("completed", [1])


@pytest.mark.full
def test_the_watcher_of_the_manual_sees_every_event_until_the_end(ran: Ran) -> None:
    kinds = [line.split()[1] for line in ran.watched.splitlines()]
    assert kinds[0] == "trainmover.job.submitted.v1"
    assert "trainmover.migration.completed.v1" in kinds
    assert kinds[-1] == "trainmover.job.completed.v1"
    assert "not signed" not in ran.watched
