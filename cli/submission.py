"""Who starts a job: the first to submit wins, the same program joins, another one is refused."""

import ast
import hashlib
import socket
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime

from trainmover.agent import requests
from trainmover.agent.imports import source_of
from trainmover.agent.orders import Program
from trainmover.bus.job import JobBus
from trainmover.bus.port import Bus, Unanswered
from trainmover.cli.phrases import names
from trainmover.schemas.envelope import Rejected, open_event
from trainmover.schemas.events import (
    JobCompleted,
    JobFailed,
    JobSubmitted,
    WorkerExited,
    WorkerStarted,
)
from trainmover.schemas.layout import Layout
from trainmover.schemas.recorded import Recorded


class Refused(ValueError):
    """This job cannot be run here; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Past:
    """What the job's stream holds."""

    records: tuple[Recorded, ...] = ()
    num_foreign: int = 0
    """Messages that the secret given does not fit."""


def digest(program: Program, layout: Layout) -> str:
    """sha256 over script, arguments and layout.

    Raises FileNotFoundError, and SyntaxError where every worker would.
    """
    source, _ = source_of(program.script, module=program.module)
    ast.parse(source, program.script)
    parts = (source, *program.argv[1 + program.module :], str(layout))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def admitted(past: Past, wanted: JobSubmitted) -> str | None:
    """Run to join, None to submit `wanted`. Raises Refused."""
    submissions = _submissions(past)
    if not submissions:
        if past.num_foreign:
            raise Refused(
                f"job {wanted.job} exists on this bus and its events are not signed with this"
                " secret: set TRAINMOVER_SECRET to that of the job, or use another --job name"
            )
        return None
    submitted = submissions[-1].event
    where = _where(submissions[-1])
    events = [r.event for r in past.records if r.event.run == submitted.run]
    if any(isinstance(e, JobCompleted | JobFailed) for e in events):
        raise Refused(f"job {wanted.job} ({where}) has ended: use another --job name")
    if submitted.script_digest != wanted.script_digest:
        raise Refused(
            f"job {wanted.job} ({where}) runs another script, arguments or layout: its digest is"
            f" {submitted.script_digest[:16]}, yours {wanted.script_digest[:16]};"
            " start the same on every machine, or use another --job name"
        )
    return submitted.run


def surplus(past: Past, machine: str, num_machines: int) -> str:
    """What a machine is told that comes to a job which has its machines; empty for the others."""
    submissions = _submissions(past)
    if not submissions:
        return ""
    run = submissions[-1].event.run
    events = [r.event for r in past.records if r.event.run == run]
    others = sorted({e.machine for e in events if isinstance(e, WorkerStarted)} - {machine})
    if len(others) < num_machines:
        return ""
    return (
        f"the job ({_where(submissions[-1])}) has its {num_machines} machines"
        f" ({names(others)}): all workers of this one stand by"
    )


@dataclass(frozen=True, slots=True)
class Submission:
    event: JobSubmitted
    time_s: float


def _submissions(past: Past) -> list[Submission]:
    return [
        Submission(r.event, r.time_s) for r in past.records if isinstance(r.event, JobSubmitted)
    ]


def _where(submission: Submission) -> str:
    at = datetime.fromtimestamp(submission.time_s).astimezone()
    since = at.isoformat(sep=" ", timespec="seconds")
    return f"submitted from {submission.event.host} at {since}"


async def refuse_twin(bus: Bus, past: Past, *, job: str, machine: str, secret: bytes) -> None:
    """Two agents of one name would end each other's workers. Raises Refused."""
    try:
        await requests.ask(bus, requests.Live(), job=job, machine=machine, secret=secret)
    except Unanswered:
        return
    where = "".join(f" ({_where(submission)})" for submission in _submissions(past)[-1:])
    raise Refused(
        f"job {job}{where} is running and its machine {machine} has an agent already: use another"
        " --job name, or another --machine name to add a machine to that job"
    )


async def past_of(bus: Bus, job: str, secret: bytes) -> Past:
    """Everything stored of the job, of whatever run. Blocks while the bus is away."""
    last = await bus.last_seq()
    records: list[Recorded] = []
    num_foreign = 0
    if last == 0:
        return Past()
    async with aclosing(bus.follow(0)) as messages:
        async for message in messages:
            try:
                event = open_event(
                    message.subject, message.payload, message.headers, job=job, secret=secret
                )
                records.append(Recorded(message.seq, message.time_s, event))
            except Rejected:
                num_foreign += 1
            if message.seq >= last:
                break
    return Past(tuple(records), num_foreign)


async def submit(
    bus: Bus, wanted: JobSubmitted, *, machine: str, secret: bytes
) -> tuple[JobSubmitted, Past]:
    """Submit the job or join it; returns the submission that holds. Raises Refused."""
    while True:
        past = await past_of(bus, wanted.job, secret)
        run = admitted(past, wanted)
        if run is not None:
            await refuse_twin(bus, past, job=wanted.job, machine=machine, secret=secret)
            return _submissions(past)[-1].event, past
        job_bus = JobBus(
            bus, job=wanted.job, run=wanted.run, source=f"run/{machine}", secret=secret
        )
        if await job_bus.publish_once(wanted, last_subject_seq=0):
            return wanted, past
        # another machine was first: read again what it said


def here() -> str:
    """Name of this host, for people."""
    return socket.gethostname()


def workers_of(records: Sequence[Recorded], machine: str) -> tuple[list[str], list[str]]:
    """Workers that agents of this machine started, and those of them nobody saw the end of."""
    events = [r.event for r in records]
    started = [e.worker for e in events if isinstance(e, WorkerStarted) and e.machine == machine]
    exited = {x.worker for e in events if isinstance(e, WorkerExited) for x in e.exits}
    return started, [worker for worker in started if worker not in exited]
