"""`trainmover run`: the agent of this machine and, without --bus, everything a job needs."""

import asyncio
import contextlib
import signal
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from trainmover.agent.agent import Agent, WorkersKeepFailing
from trainmover.agent.tracebacks import last_line
from trainmover.agent.workers import WarmFailed
from trainmover.bus.job import JobBus
from trainmover.bus.nats import connect, without_secrets
from trainmover.bus.port import BusError
from trainmover.bus.server import ServerFailed
from trainmover.cli import children, embedded, report, reporting, start, submission
from trainmover.cli.console import Console
from trainmover.cli.options import RunOptions, warnings
from trainmover.cli.progress import Progress
from trainmover.schemas.events import JobCompleted, JobFailed, JobSubmitted, WorkerRegistered
from trainmover.telemetry.spans import FLUSH_S, Unusable
from trainmover.telemetry.stream import StreamTracer

CONNECT_S = 5.0
SETTLE_S = 1.0
"""How long the end of the job waits for its last incident to be closed."""
USER_CODE, USAGE, UNREACHABLE = 1, 2, 6


@dataclass(slots=True)
class Interrupt:
    """The signal that ended us, if one did; the first asks for an orderly end, the next insists."""

    task: "asyncio.Task[int]"
    stop: Callable[[], None] | None = None
    leave: Callable[[], None] | None = None
    """What SIGTERM asks for: that the machine goes, and the job need not."""
    number: int = 0

    @property
    def code(self) -> int:
        return 128 + self.number

    def __call__(self, number: int) -> None:
        first, self.number = not self.number, self.number or number
        if first and number == signal.SIGTERM and self.leave is not None:
            self.leave()
        elif first and self.stop is not None:
            self.stop()
        else:
            self.task.cancel()


@dataclass(frozen=True, slots=True)
class _Job:
    options: RunOptions
    submitted: JobSubmitted
    bus: JobBus
    agent: Agent
    progress: Progress
    console: Console


def run(options: RunOptions, console: Console | None = None) -> int:
    """The exit code. Blocks until the job is over or a signal ends it; leaves no process."""
    return asyncio.run(_interruptible(options, console or Console()))


async def _interruptible(options: RunOptions, console: Console) -> int:
    task = asyncio.create_task(_guarded(options, console, lambda: interrupt))
    interrupt = Interrupt(task)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, interrupt, number)
    try:
        return await task
    except asyncio.CancelledError:
        return interrupt.code


async def _guarded(
    options: RunOptions, console: Console, interrupt: Callable[[], Interrupt]
) -> int:
    """Errors that a user can do something about, as a sentence and an exit code."""
    code = 0
    try:
        return await _run(options, console, interrupt())
    except* (submission.Refused, FileNotFoundError, Unusable) as errors:
        code = _explain(errors, console, USAGE)
    except* SyntaxError as errors:
        code = _explain(errors, console, USER_CODE)
    except* (BusError, ServerFailed, children.ServiceFailed) as errors:
        code = _explain(errors, console, UNREACHABLE)
    except* (WorkersKeepFailing, WarmFailed) as errors:
        code = _explain(errors, console, USER_CODE)
    return code


def _explain(errors: BaseExceptionGroup[Exception], console: Console, code: int) -> int:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            _explain(error, console, code)
        elif isinstance(error, SyntaxError):
            console.say("".join(traceback.format_exception_only(error)))
        else:
            console.say(str(error))
    return code


async def _run(options: RunOptions, console: Console, interrupt: Interrupt) -> int:
    secret = bytes.fromhex(options.secret)
    wanted = start.wanted(options)
    tracer = start.tracer(options)
    async with contextlib.AsyncExitStack() as stack:
        directory = stack.enter_context(start.directory())
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
            secret=secret,
        )
        if told := submission.surplus(past, options.machine, options.num_machines):
            console.say(told)
        source = f"agent/{options.machine}"
        stack.callback(tracer.close, FLUSH_S)
        stream = StreamTracer(tracer, source)
        start.log_as_json(options, submitted.run, stream)
        bus = JobBus(nats, job=options.job, run=submitted.run, source=source, secret=secret)
        stack.enter_context(start.session_file(options, submitted.run, url, directory))
        settings = start.settings(options, submitted, url, directory)
        roster = await start.roster(options, submitted, past, bus)
        job = _Job(
            options,
            submitted,
            bus,
            Agent(settings, bus, roster, stream, console.show),
            Progress(console),
            console,
        )
        await start.answer_requests(nats, job.agent, options, submitted.run, secret)
        helpers: list[Coroutine[None, None, None]] = []
        if options.bus is None:
            helpers = start.services(options, submitted.run, url, directory)
        end = await _attend(job, helpers, interrupt)
        return _last_words(job, end, interrupt)
    raise AssertionError("no context here swallows an error")


async def _attend(
    job: _Job, helpers: list[Coroutine[None, None, None]], interrupt: Interrupt
) -> JobCompleted | JobFailed | None:
    """The agent runs; beside it, what watches and serves."""

    def stop() -> None:
        job.progress.hush()
        job.agent.stop()

    def leave() -> None:
        job.console.say(
            f"SIGTERM: machine {job.options.machine} is to go within {job.options.grace_s:g} s,"
            " its ranks to standbys; a second signal ends it at once"
        )
        job.agent.leave()

    interrupt.stop, interrupt.leave = stop, leave
    job.console.say(
        f"job {job.options.job}, run {job.submitted.run}, layout {job.submitted.layout}"
    )
    for warning in warnings(job.options):
        job.console.say(f"warning: {warning}")
    bus = None if job.options.bus is None else without_secrets(job.options.bus)
    async with asyncio.TaskGroup() as group:
        watching = (
            job.progress.follow(job.bus),
            job.progress.remind(),
            job.progress.say_what_is_waited_for(bus),
        )
        tasks = [group.create_task(work) for work in (*watching, *helpers)]
        try:
            end = await job.agent.run()
            if end is not None:
                await job.progress.settled(SETTLE_S)
        finally:
            for task in tasks:
                task.cancel()
    return end


def _last_words(job: _Job, end: JobCompleted | JobFailed | None, interrupt: Interrupt) -> int:
    """Say how it ended and write the report; the exit code."""
    match end:
        case None:
            code, words = interrupt.code, "ended before the job was over"
        case JobCompleted():
            code, words = 0, f"completed: {end.completed_steps} steps, state {end.state_digest}"
        case JobFailed():
            lines = end.reason.strip().splitlines() or [""]
            shown = any(lines[-1] in line for line in job.agent.tail())  # the worker printed it
            code = end.exit_code
            words = f"failed ({code}): {lines[0] if shown else end.reason}{_first_error(job)}"
    job.console.status("")
    job.console.say(words)
    if job.options.report is not None:
        found = report.report(
            job.progress.records,
            job=job.options.job,
            run=job.submitted.run,
            layout=str(job.submitted.layout),
            exit_code=code,
        )
        reporting.write(found, job.options.report)
    return code


def _first_error(job: _Job) -> str:
    """Why workers of this machine ended before they registered, where a traceback tells."""
    if any(isinstance(r.event, WorkerRegistered) for r in job.progress.records):
        return ""
    error = last_line(job.agent.tail())
    return f"\nthe first of them raised {error}" if error else ""
