"""The report of a run: what a script or a test wants to know of it, as JSON."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from trainmover.cli.incidents import Incident
from trainmover.schemas.events import JobCompleted
from trainmover.schemas.recorded import Recorded


class Report(BaseModel):
    model_config = ConfigDict(frozen=True)

    job: str
    run: str
    layout: str
    exit_code: int
    completed_steps: int | None
    """None: the job did not complete."""
    state_digest: str | None
    """sha256 over the tracked state of every rank, in rank order."""
    incidents: tuple[Incident, ...]


def report(
    records: Sequence[Recorded],
    found: Sequence[Incident],
    *,
    job: str,
    run: str,
    layout: str,
    exit_code: int,
) -> Report:
    ends = [r.event for r in records if isinstance(r.event, JobCompleted)]
    return Report(
        job=job,
        run=run,
        layout=layout,
        exit_code=exit_code,
        completed_steps=ends[0].completed_steps if ends else None,
        state_digest=ends[0].state_digest if ends else None,
        incidents=tuple(found),
    )


def write(report: Report, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report.model_dump_json(indent=2) + "\n")
