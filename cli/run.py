"""`trainmover run`: the agent of this machine and, without --bus, everything a job needs."""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trainmover.agent import requests
from trainmover.agent.agent import Agent, WorkersKeepFailing
from trainmover.agent.roster import Roster, next_number
from trainmover.agent.settings import Settings
from trainmover.agent.workers import WarmFailed
from trainmover.bus.job import JobBus
from trainmover.bus.nats import NatsBus, connect
from trainmover.bus.port import BusError
from trainmover.bus.server import ServerFailed
from trainmover.cli import children, embedded, report, session, submission
from trainmover.cli.console import Console
from trainmover.cli.options import RunOptions
from trainmover.cli.progress import Progress
from trainmover.schemas.events import (
    Exit,
    FaultInjected,
    JobCompleted,
    JobFailed,
    JobSubmitted,
    WorkerExited,
)

CONNECT_S = 5.0
SETTLE_S = 1.0
"""How long the end of the job waits for its last incident to be closed."""
USER_CODE, USAGE, UNREACHABLE = 1, 2, 6


@dataclass(slots=True)
class Interrupt:
    """The signal that ended us, if one did; the first asks for an orderly end, the next insists."""

    task: "asyncio.Task[int]"
    stop: Callable[[], None] | None = None
    number: int = 0
    insisted: bool = field(default=False)

    def __call__(self, number: int) -> None:
        first, self.number = not self.number, self.number or number
        if first and self.stop is not None:
            self.stop()
        else:
            self.task.cancel()


def run(options: RunOptions) -> int:
    """The exit code. Blocks until the job is over or a signal ends it; leaves no process."""
    return asyncio.run(_interruptible(options))


async def _interruptible(options: RunOptions) -> int:
    console = Console()
    task = asyncio.create_task(_guarded(options, console, lambda: interrupt))
    interrupt = Interrupt(task)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, interrupt, number)
    try:
        code = await task
    except asyncio.CancelledError:
        code = 0
    return 128 + interrupt.number if interrupt.number else code


async def _guarded(
    options: RunOptions, console: Console, interrupt: Callable[[], Interrupt]
) -> int:
    """Errors that a user can do something about, as a sentence and an exit code."""
    code = 0
    try:
        return await _run(options, console, interrupt())
    except* (submission.Refused, FileNotFoundError) as errors:
        code = _explain(errors, console, USAGE)
    except* (BusError, ServerFailed, children.ServiceFailed) as errors:
        code = _explain(errors, console, UNREACHABLE)
    except* (WorkersKeepFailing, WarmFailed) as errors:
        code = _explain(errors, console, USER_CODE)
    return code


def _explain(errors: BaseExceptionGroup[Exception], console: Console, code: int) -> int:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            _explain(error, console, code)
        else:
            console.say(str(error))
    return code


async def _run(options: RunOptions, console: Console, interrupt: Interrupt) -> int:
    secret = bytes.fromhex(options.secret)
    wanted = _submission(options)
    async with contextlib.AsyncExitStack() as stack:
        directory = stack.enter_context(_directory())
        if options.bus is not None:
            url = options.bus
        else:
            url = await stack.enter_async_context(embedded.server(directory / "bus"))
        nats = await connect(url, options.job, deadline_s=CONNECT_S)
        stack.push_async_callback(nats.close)
        submitted, past = await submission.submit(
            nats,
            wanted,
            machine=options.machine,
            num_machines=options.num_machines,
            secret=secret,
        )
        bus = JobBus(
            nats,
            job=options.job,
            run=submitted.run,
            source=f"agent/{options.machine}",
            secret=secret,
        )
        stack.enter_context(_session(options, submitted.run, url, directory))
        helpers: list[Coroutine[None, None, None]] = []
        if options.bus is None:
            log_dir = options.log_dir or directory
            helpers = _services(options, submitted.run, url, log_dir)
        roster = await _roster(options, submitted.run, past, bus)
        agent = Agent(_settings(options, submitted, url, directory), bus, roster, console.show)
        interrupt.stop = agent.stop
        await _answer_requests(nats, agent, options, submitted.run, secret)
        return await _attend(agent, bus, helpers, options, submitted, console)
    raise AssertionError("an exit stack that swallows errors was not meant")


async def _attend(
    agent: Agent,
    bus: JobBus,
    helpers: list[Coroutine[None, None, None]],
    options: RunOptions,
    submitted: JobSubmitted,
    console: Console,
) -> int:
    """The agent runs; beside it, what watches and serves; then the last words."""
    progress = Progress(console)
    console.say(f"job {options.job}, run {submitted.run}, layout {submitted.layout}")
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in (progress.follow(bus), *helpers)]
        try:
            end = await agent.run()
            if end is not None:
                await progress.settled(SETTLE_S)
        finally:
            for task in tasks:
                task.cancel()
    code = _code(end)
    console.status("")
    console.say(_last_words(end, agent))
    if options.report is not None:
        found = report.report(
            progress.records,
            progress.incidents(),
            job=options.job,
            run=submitted.run,
            layout=str(submitted.layout),
            exit_code=code,
        )
        report.write(found, options.report)
    return code


def _code(end: JobCompleted | JobFailed | None) -> int:
    return end.exit_code if isinstance(end, JobFailed) else 0


def _last_words(end: JobCompleted | JobFailed | None, agent: Agent) -> str:
    match end:
        case None:
            return "ended before the job was over"
        case JobCompleted():
            return f"completed: {end.completed_steps} steps, state {end.state_digest[:16]}"
        case JobFailed():
            lines = end.reason.strip().splitlines() or [""]
            shown = any(lines[-1] in line for line in agent.tail())  # the worker printed it
            return f"failed ({end.exit_code}): {lines[0] if shown else end.reason}"


def _submission(options: RunOptions) -> JobSubmitted:
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
        stall_timeout_s=options.stall_timeout_s,
    )


def _settings(options: RunOptions, submitted: JobSubmitted, url: str, directory: Path) -> Settings:
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
        num_threads=submitted.num_threads,
        hash_seed=submitted.hash_seed,
        log_dir=options.log_dir,
    )


async def _roster(options: RunOptions, run: str, past: submission.Past, bus: JobBus) -> Roster:
    """The names to go on with; workers of an earlier agent of this machine died with it."""
    records = [r for r in past.records if r.event.run == run]
    started, lost = submission.workers_of(records, options.machine)
    if lost:
        exits = tuple(Exit(worker=worker, code=-signal.SIGKILL) for worker in lost)
        event = WorkerExited(job=options.job, run=run, machine=options.machine, exits=exits)
        await bus.publish(event, time_s=time.time())
    size = options.workers_per_machine + options.num_standbys
    return Roster(options.machine, size, next_number(options.machine, started))


async def _answer_requests(
    nats: NatsBus, agent: Agent, options: RunOptions, run: str, secret: bytes
) -> None:
    async def kill(request: requests.Kill) -> requests.Done:
        if request.run != run:
            return requests.Done(refused=f"this is run {run}, the request is for {request.run}")
        why = FaultInjected(
            job=options.job, run=run, kind="kill", worker=request.worker, rank=request.rank
        )
        return requests.Done(refused=await agent.kill(request.worker, why=why))

    await requests.answer(nats, kill, job=options.job, machine=options.machine, secret=secret)


def _services(
    options: RunOptions, run: str, url: str, log_dir: Path
) -> list[Coroutine[None, None, None]]:
    log_dir.mkdir(parents=True, exist_ok=True)
    known = children.environment(bus=url, job=options.job, run=run, secret=options.secret)
    return [children.supervise(name, known, log_dir / f"{name}.log") for name in children.SERVICES]


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))  # short: a socket path has 107 bytes
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _session(options: RunOptions, run: str, url: str, directory: Path) -> Iterator[None]:
    held = session.live().get(options.job)
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
