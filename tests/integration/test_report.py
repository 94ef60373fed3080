"""The report of a real job with a killed rank: while it runs, from its file, as every picture."""

import asyncio
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.job import Finished, Job
from tests.documents import run_by
from tests.integration.command import TRAINMOVER
from tests.unit.incident_streams import CRASH, JOB, started, submitted

from trainmover.bus.job import JobBus
from trainmover.bus.nats import connect
from trainmover.bus.server import EmbeddedServer
from trainmover.cli.phrases import duration
from trainmover.cli.report import Report
from trainmover.schemas.events import JobCompleted

pytestmark = [pytest.mark.concurrent, pytest.mark.timeout(180)]


def told(folder: Path, *arguments: str, **variables: str) -> str:
    """What a `trainmover` command beside the job prints."""
    done = subprocess.run(
        [*TRAINMOVER, *arguments],
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder / "xdg"), "COLUMNS": "120", **variables},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


@dataclass(frozen=True)
class Ran:
    folder: Path
    finished: Finished
    live: Report
    """Asked for while the job ran on."""
    status: str

    @property
    def incident(self) -> dict[str, Any]:
        (incident,) = self.finished.report["incidents"]
        return dict(incident)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Two ranks of which one is killed in step 6."""
    folder = tmp_path_factory.mktemp("report")
    job = Job(folder, "by_rank.py", script_args=(f"--folder={folder}", "--steps=12"))
    job.pace(5)
    job.inject("kill:rank=1,step=6,at=backward")
    with job:
        job.wait_for("a parked standby", lambda: bool(job.parked()))
        job.pace(9)
        job.recovered(1)
        live = Report.model_validate_json(told(folder, "report", "--json", "--job", job.name))
        status = told(folder, "status", "--job", job.name)
        job.pace(12)
        return Ran(folder, job.finish(), live, status)


def test_report_and_status_of_a_running_job_tell_the_downtime_that_its_run_tells(ran: Ran) -> None:
    assert ran.finished.code == 0, ran.finished.output
    said = f"downtime {duration(ran.incident['downtime_s'])} since fault.injected (less one step"
    assert said in ran.status
    assert said in ran.finished.output
    assert ran.live.exit_code is None
    assert [i.downtime_s for i in ran.live.incidents] == [ran.incident["downtime_s"]]


def test_an_incident_says_when_each_rank_reached_what(ran: Ran) -> None:
    stages = ["collected", "obeyed", "restored", "switched", "resumed", "first_step"]
    (migration,) = ran.incident["migrations"]
    assert [path["joined"] for path in migration["ranks"]] == [False, True]
    for path in migration["ranks"]:
        assert sorted(path["reached_s"], key=stages.index) == stages
        assert sorted(path["reached_s"].values()) == [path["reached_s"][s] for s in stages]
    told_in_order = ("detected", "planned", "collected", "prepared", "pulled", "switched")
    times = [ran.incident[f"{name}_s"] for name in (*told_in_order, "first_step")]
    assert times == sorted(times)
    assert 0 < ran.incident["normal_step_s"] < ran.incident["first_step_s"]


def test_the_commands_of_the_manual(ran: Ran) -> None:
    (block,) = run_by("test_the_commands_of_the_manual")
    done = subprocess.run(
        ["bash", "-euc", block],
        cwd=ran.folder,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    )
    text, brace, as_json = done.stdout.partition("{")
    assert json.loads(brace + as_json) == ran.finished.report
    assert "outcome           completed, 12 steps" in text
    assert "rank 1 " in text
    assert "was killed by SIGKILL" in text
    page = (ran.folder / "report.html").read_text()
    assert ElementTree.fromstring(page).tag.endswith("html")
    assert (ran.folder / "incidents.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_sums_up_the_job(ran: Ran) -> None:
    report = ran.finished.report
    assert report["incidents_by_kind"] == {"crash": 1}
    assert report["standbys_used"] == 1
    assert [fault["words"] for fault in report["faults_injected"]] == [
        f"kill {ran.incident['leavers'][0]} in step 6"
    ]
    assert report["lost_s"] == pytest.approx(ran.incident["downtime_s"])
    assert report["goodput"] == pytest.approx(1 - report["lost_s"] / report["wall_s"])
    assert [event["type"] for event in report["events"]][-1].startswith(("job.", "worker."))


async def test_a_job_that_has_ended_is_told_from_its_bus(tmp_path: Path) -> None:
    secret = "ab" * 32
    server = EmbeddedServer(tmp_path / "bus")
    await server.start()
    try:
        nats = await connect(server.url, "j", deadline_s=5)
        bus = JobBus(nats, source="test", secret=bytes.fromhex(secret), **JOB)
        end = JobCompleted(**JOB, completed_steps=200, state_digest="ab" * 32)
        for event in (submitted(3), started(), *(r.event for r in CRASH), end):
            await bus.publish(event)
        await nats.close()
        where = ("report", "--bus", server.url, "--job", "j")
        text = await asyncio.to_thread(told, tmp_path, *where, TRAINMOVER_SECRET=secret)
    finally:
        await server.stop()
    assert "outcome           completed, 200 steps" in text
    assert "incident g2 (crash, completed): rank 1: m-w1 -> m-w9" in text
    assert "all go on from 7 committed steps" in text
