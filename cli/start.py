"""What a run is made of: folder, session file, submission, the agent's settings, services."""

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path

from trainmover.agent import requests
from trainmover.agent.agent import Agent
from trainmover.agent.roster import Roster, next_number
from trainmover.agent.settings import Settings
from trainmover.bus.job import JobBus
from trainmover.bus.port import Bus
from trainmover.cli import children, session, submission
from trainmover.cli.options import RunOptions
from trainmover.schemas.events import (
    Exit,
    FaultInjected,
    InterruptionCancelled,
    JobSubmitted,
    WorkerExited,
)
from trainmover.schemas.interruptions import Interruptions
from trainmover.telemetry import logs, spans
from trainmover.telemetry.spans import Tracer
from trainmover.telemetry.stream import StreamTracer


def wanted(options: RunOptions) -> JobSubmitted:
    return JobSubmitted(
        job=options.job,
        run=options.run,
        layout=options.layout,
        workers_per_machine=options.workers_per_machine,
        num_standbys=options.num_standbys,
        num_threads=options.num_threads,
        hash_seed=options.hash_seed,
        script_digest=submission.digest(options.program, options.layout),
        host=submission.here(),
        max_incidents=options.max_incidents,
        max_failures=options.max_failures,
        warm_up=options.warm_up,
        max_planned=options.max_planned,
        stall_timeout_s=options.stall_timeout_s,
    )


def settings(options: RunOptions, submitted: JobSubmitted, url: str, directory: Path) -> Settings:
    """What belongs to the job comes from its submission, so that every worker has the same."""
    return Settings(
        job=options.job,
        run=submitted.run,
        machine=options.machine,
        program=options.program,
        layout=str(submitted.layout),
        bus=url,
        directory=directory,
        workers_per_machine=submitted.workers_per_machine,
        num_standbys=submitted.num_standbys,
        secret=options.secret,
        host=options.host,
        port_range=options.port_range,
        faults=";".join(options.faults),
        step_digests=options.step_digests,
        max_steps=options.max_steps,
        num_threads=submitted.num_threads,
        hash_seed=submitted.hash_seed,
        script_digest=submitted.script_digest,
        unit=submitted.unit,
        log_dir=options.log_dir,
        grace_s=options.grace_s,
        labels=",".join(options.labels),
    )


def tracer(options: RunOptions) -> Tracer:
    """The agent's. Children inherit the variables. Raises Unusable, before anything was started."""
    if options.trace_dir is not None:
        os.environ.update(spans.into(options.trace_dir, os.environ))
    about = {"job": options.job, "machine": options.machine}
    return spans.tracer(f"agent-{options.machine}", "trainmover-agent", about, os.environ)


def log_as_json(options: RunOptions, run: str, stream: StreamTracer) -> None:
    """If that is asked for; else people read what is logged here."""
    if logs.json_wanted(os.environ):
        about = {"service": "agent", "job": options.job, "run": run, "machine": options.machine}
        logs.configure("warning", as_json=True, about=about).facts = stream.facts


async def roster(
    options: RunOptions, submitted: JobSubmitted, past: submission.Past, bus: JobBus
) -> Roster:
    """The names to go on with; workers of an earlier agent of this machine died with it.

    What SIGTERM had told of the machine is over: it is here.
    """
    run = submitted.run
    records = [r for r in past.records if r.event.run == run]
    started, lost = submission.workers_of(records, options.machine)
    if lost:
        exits = tuple(Exit(worker=worker, code=-signal.SIGKILL) for worker in lost)
        event = WorkerExited(job=options.job, run=run, machine=options.machine, exits=exits)
        await bus.publish(event, time_s=time.time())
    interruptions = Interruptions()
    for record in records:
        interruptions = interruptions.after(record.event)
    for old in interruptions.drains(options.machine):
        if old.kind == "preemption":
            reason = f"machine {options.machine} is back"
            cancelled = InterruptionCancelled(
                job=options.job, run=run, interruption=old.interruption, reason=reason
            )
            await bus.publish(cancelled)
    size = submitted.workers_per_machine + submitted.num_standbys
    return Roster(options.machine, size, next_number(options.machine, started))


async def answer_requests(
    bus: Bus, agent: Agent, options: RunOptions, run: str, secret: bytes
) -> None:
    async def kill(request: requests.Kill) -> requests.Done:
        if request.run != run:
            return requests.Done(refused=f"this is run {run}, the request is for {request.run}")
        why = FaultInjected(
            job=options.job, run=run, kind="kill", worker=request.worker, rank=request.rank
        )
        return requests.Done(refused=await agent.kill(request.worker, why=why))

    await requests.answer(bus, kill, job=options.job, machine=options.machine, secret=secret)


def services(
    options: RunOptions, run: str, url: str, directory: Path
) -> list[Coroutine[None, None, None]]:
    """To be run beside the agent; their logs are kept with the workers', if those are."""
    log_dir = options.log_dir or directory
    log_dir.mkdir(parents=True, exist_ok=True)
    known = children.environment(bus=url, job=options.job, run=run, secret=options.secret)
    return [children.supervise(name, known, log_dir / f"{name}.log") for name in children.SERVICES]


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))  # short: a socket path has 107 bytes
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def session_file(options: RunOptions, run: str, url: str, directory: Path) -> Iterator[None]:
    held = session.live().get(options.job)
    if held is not None and options.bus is not None:
        yield  # another agent of this job on this host: its file tells as much
        return
    if held is not None:
        raise submission.Refused(
            f"job {options.job} runs on this machine already (pid {held.pid}): use another --job"
        )
    own = session.Session(
        url=url,
        secret=options.secret,
        job=options.job,
        run=run,
        pid=os.getpid(),
        directory=str(directory),
    )
    session.write(own)
    try:
        yield
    finally:
        session.remove(own)
