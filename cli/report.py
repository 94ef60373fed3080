"""The report of a job: what a person, a script or a test wants to know of it afterwards."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from trainmover.cli.incidents import Incident, incidents
from trainmover.cli.pending import Pending, pending
from trainmover.cli.phrases import duration
from trainmover.cli.words import in_words
from trainmover.schemas.events import (
    FaultInjected,
    JobCompleted,
    JobFailed,
    JobStarted,
    JobSubmitted,
)
from trainmover.schemas.recorded import Recorded

VERSION = 2
"""Raised when a field is taken away or changes its meaning."""


SIGNALS_FROM = 128


class NoReport(ValueError):
    """A file that is no report, or one of a newer version."""


class Happened(BaseModel):
    """A stored event. `at_s`: seconds since the job was submitted."""

    model_config = ConfigDict(frozen=True)

    at_s: float
    type: str
    words: str


class Report(BaseModel):
    """All that pictures and pages of a job are made from."""

    model_config = ConfigDict(frozen=True)

    version: int = VERSION
    job: str
    run: str
    layout: str
    script_digest: str = ""
    """sha256 over script, arguments and layout."""
    submitted: float | None = None
    """Seconds since 1970, by the clock of the bus."""
    exit_code: int | None
    """None: it is not over."""
    end_reason: str = ""
    """Why it failed."""
    completed_steps: int | None
    """None: the job did not complete."""
    state_digest: str | None
    """sha256 over the tracked state of every rank, in rank order."""
    wall_s: float | None = None
    """Since `job.started`; None: it did not start."""
    lost_s: float = 0.0
    """Of `wall_s`: downtimes, and what interruptions without an end have taken so far."""
    goodput: float | None = None
    """1 - lost_s / wall_s."""
    incidents: tuple[Incident, ...]
    pending: tuple[Pending, ...] = ()
    """Moves that were asked for and are not decided, of a job that runs."""
    incidents_by_kind: dict[str, int] = {}
    standbys_used: int = 0
    """Workers that took over a rank and committed a step in it."""
    faults_injected: tuple[Happened, ...] = ()
    events: tuple[Happened, ...] = ()


def report(
    records: Sequence[Recorded],
    *,
    job: str,
    run: str,
    layout: str,
    exit_code: int | None,
    now: float = 0.0,
) -> Report:
    """`records`: the stream of the job; of it counts this run. `now`: of a job that runs, s."""
    of_run = [r for r in records if r.event.run == run]
    found = incidents(of_run)
    ends = [r for r in of_run if isinstance(r.event, JobCompleted | JobFailed)]
    end = ends[0].event if ends else None
    until = ends[0].time_s if ends else max([now, *(r.time_s for r in of_run)])
    started = next((r.time_s for r in of_run if isinstance(r.event, JobStarted)), None)
    submissions = [(r.time_s, r.event) for r in of_run if isinstance(r.event, JobSubmitted)]
    submitted, submission = submissions[0] if submissions else (None, None)
    wall_s = max(0.0, until - started) if started is not None else None
    lost_s = sum(_lost(incident, started, until) for incident in found) if started else 0.0
    happened = [_happened(r, of_run[0].time_s) for r in of_run]
    return Report(
        job=job,
        run=run,
        layout=layout,
        script_digest=submission.script_digest if submission is not None else "",
        submitted=submitted,
        exit_code=exit_code,
        end_reason=end.reason if isinstance(end, JobFailed) else "",
        completed_steps=end.completed_steps if isinstance(end, JobCompleted) else None,
        state_digest=end.state_digest if isinstance(end, JobCompleted) else None,
        wall_s=wall_s,
        lost_s=lost_s,
        goodput=max(0.0, 1 - lost_s / wall_s) if wall_s else None,
        incidents=tuple(found),
        pending=pending(of_run),
        incidents_by_kind=dict(Counter(incident.kind for incident in found)),
        standbys_used=sum(_joined(incident) for incident in found),
        faults_injected=tuple(h for h in happened if h.type == FaultInjected.TYPE),
        events=tuple(happened),
    )


def summary(report: Report) -> list[tuple[str, str]]:
    """The job in a few words: (what, value)."""
    steps = "" if report.completed_steps is None else f"{report.completed_steps} steps"
    by = "ended by a signal" if (report.exit_code or 0) > SIGNALS_FROM else "failed"
    end = {None: "not over", 0: "completed"}.get(report.exit_code, f"{by} ({report.exit_code})")
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(report.incidents_by_kind.items()))
    lost_steps = sum(incident.lost_steps or 0 for incident in report.incidents)
    found = [
        ("job", report.job),
        ("run", report.run),
        ("layout", report.layout),
        ("script", report.script_digest[:16]),
        ("outcome", ", ".join(filter(None, (end, steps, report.end_reason)))),
        ("state", (report.state_digest or "")[:16]),
        ("wall time", duration(report.wall_s) if report.wall_s is not None else "not started"),
        ("time lost", duration(report.lost_s)),
        ("goodput", f"{report.goodput:.2%}" if report.goodput is not None else ""),
        ("incidents", f"{len(report.incidents)} ({kinds})" if kinds else "none"),
        ("moves pending", "; ".join(each.in_words() for each in report.pending)),
        ("steps done again", str(lost_steps)),
        ("standbys used", str(report.standbys_used)),
        ("faults injected", "; ".join(fault.words for fault in report.faults_injected) or "none"),
    ]
    return [(what, value) for what, value in found if value]


def exit_code_of(records: Sequence[Recorded]) -> int | None:
    """As the stream tells it; None while the job is not over."""
    for record in records:
        match record.event:
            case JobCompleted():
                return 0
            case JobFailed():
                return record.event.exit_code
            case _:
                pass
    return None


def read(path: Path) -> Report:
    """Raises OSError, and NoReport that says what the file is instead."""
    text = path.read_bytes()
    try:
        written = TypeAdapter(dict[str, object]).validate_json(text)
    except ValidationError:
        raise NoReport(
            f"{path} is no report: expected the JSON that `trainmover run --report FILE` wrote"
        ) from None
    version = written.get("version", VERSION)
    if isinstance(version, int) and version > VERSION:
        raise NoReport(
            f"{path} is a report of version {version}, this trainmover reads up to {VERSION}:"
            " read it with the one that wrote it, or a newer one"
        )
    try:
        return Report.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise NoReport(
            f"{path} is no report that `trainmover run --report FILE` wrote: {where}:"
            f" {first['msg']}"
        ) from None


def _lost(incident: Incident, started: float, until: float) -> float:
    """The part of it that is after the start of the job."""
    if incident.undecided:
        return 0.0
    end = until if incident.downtime_s is None else incident.t0 + incident.downtime_s
    return max(0.0, min(end, until) - max(incident.t0, started))


def _joined(incident: Incident) -> int:
    if incident.outcome != "completed":
        return 0
    return sum(path.joined for path in incident.migrations[-1].ranks)


def _happened(record: Recorded, since: float) -> Happened:
    return Happened(
        at_s=record.time_s - since,
        type=record.event.TYPE,
        words=in_words(record.event),
    )
