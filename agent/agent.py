"""One agent per machine: keeps its workers alive, says what becomes of them, ends them in order.

Losing an agent is losing its machine: its workers die with it.
"""

import asyncio
import contextlib
import secrets
import signal
import time
from collections.abc import Callable, Coroutine

import structlog

from trainmover.agent import telemetry
from trainmover.agent.orders import Exited, Ready, Started
from trainmover.agent.outbox import Outbox
from trainmover.agent.output import Output, Show, label, show_plain
from trainmover.agent.roster import Place, Roster
from trainmover.agent.settings import Settings
from trainmover.agent.speech import Speech
from trainmover.agent.tenure import RETIRE_WITHIN_S, Tenure
from trainmover.agent.workers import WarmFailed, Workers
from trainmover.bus.job import JobBus
from trainmover.schemas.base import Event
from trainmover.schemas.events import (
    Exit,
    FaultInjected,
    InterruptionAnnounced,
    JobCompleted,
    JobFailed,
    RankReady,
    StandbyWarmed,
    UserError,
    WorkerExited,
    WorkerStarted,
)
from trainmover.schemas.local import Beat, Crash
from trainmover.telemetry.stream import StreamTracer

EXITS_WITHIN_S = 0.01
"""Exits this close together have one cause and make one event."""
TERMINATE_WITHIN_S = 2.0
ANNOUNCE_S = 1.0
"""An agent whose workers hold no rank has nothing to wait for but that this is known."""
END_WITHIN_S = 3.0
"""What of the grace after SIGTERM is kept for the end of the workers."""
TERMINATED = 143
"""Exit code of a job that is told to go, as a shell has it for SIGTERM."""
MAX_WARM_DEATHS = 3
VERDICT_WITHIN_S = 3.0
"""After the last worker ended for good, the services say why the job failed; or the agent does."""

log = structlog.get_logger(__name__)


class WorkersKeepFailing(RuntimeError):
    """Worker after worker ended before it was of use: nothing is left to wait for."""


class Agent:
    """Not thread-safe; lives in one event loop. `run` once."""

    def __init__(
        self,
        settings: Settings,
        bus: JobBus,
        roster: Roster,
        stream: StreamTracer,
        show: Show = show_plain,
    ) -> None:
        self._settings = settings
        self._stream = stream
        self._show = show
        self._bus = bus
        self._roster = roster
        self._outbox = Outbox(self._store)
        self._speech = Speech(self, job=settings.job, run=settings.run)
        self._beats: dict[str, Beat] = {}
        self._errors: dict[str, UserError] = {}
        self._outputs: dict[str, Output] = {}
        self._shown: set[int] = set()
        self._exits: list[Exit] = []
        self._reports: asyncio.Task[None] | None = None
        """What tells of the last exits."""
        self._tenure = Tenure(settings.machine)
        self._news = asyncio.Event()
        self._changed = asyncio.Event()
        self._over = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._end: JobCompleted | JobFailed | None = None
        self._failure: str = ""
        self._tasks: asyncio.TaskGroup | None = None
        self._told_at: float | None = None
        """When it was told that its machine goes, monotonic seconds."""

    # ---- what the rest of the process asks

    async def run(self) -> JobCompleted | JobFailed | None:
        """Run workers until the job is over; None when `stop` came first. No child is left.

        Raises WarmFailed, and WorkersKeepFailing when no worker is left and none will be started.
        """
        server = await self._speech.serve(self._settings.socket)
        self._workers = await self._open()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self._spawn(self._hear())
                self._spawn(self._follow())
                machine = self._settings.machine
                self._spawn(telemetry.tell(self._bus, machine, self._beats, self._news))
                self._fill()
                await self._over.wait()
                await self._wind_down()
                for task in self._running:
                    task.cancel()
        finally:
            await self._workers.close()
            server.close()
            await self._speech.hush()
            await self._outbox.close()
        if self._failure:
            raise WorkersKeepFailing(self._failure)
        return self._end

    def stop(self) -> None:
        """End the workers and return from `run`: at a signal, before the job is over."""
        self._over.set()

    def leave(self) -> None:
        """The machine is to go: have its ranks moved, then end the workers and return from `run`.

        Ends with the job, when its workers hold no rank, or when the grace is over.
        """
        self._told_at = time.monotonic()
        if self._tasks is None:
            self.stop()
        else:
            self._spawn(self._leave())

    def tail(self) -> tuple[str, ...]:
        """The last lines of every worker's output."""
        return tuple(line for output in self._outputs.values() for line in output.tail)

    async def kill(self, worker: str, *, why: FaultInjected) -> str:
        """Kill a worker of this machine once `why` is stored; returns a refusal or ""."""
        if worker not in self._roster.places:
            alive = ", ".join(self._roster.places) or "none"
            return f"machine {self._settings.machine} has no live worker {worker}; alive: {alive}"
        await self._bus.publish(why)
        self._workers.signal(worker, signal.SIGKILL)
        return ""

    # ---- what workers say (speech.Hearer)

    async def on_fact(
        self, worker: str, event: Event, time_s: float, stored: Callable[[], None]
    ) -> None:
        if isinstance(event, InterruptionAnnounced) and self._over.is_set():
            self._workers.signal(worker, signal.SIGTERM)  # it takes the first for notice
            return
        warm = isinstance(event, StandbyWarmed) and event.resident
        if (warm or isinstance(event, RankReady)) and worker in self._roster.places:
            self._roster = self._roster.useful(worker)
        await self._outbox.put(worker, event, time_s, stored)

    def on_beat(self, beat: Beat) -> None:
        before = self._beats.get(beat.worker)
        if beat.worker not in self._roster.places:
            return  # read after its exit
        self._beats[beat.worker] = beat
        if before is None or before.phase != beat.phase:
            self._news.set()

    def on_crash(self, crash: Crash) -> None:
        self._errors[crash.worker] = crash.error

    # ---- workers

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """It is cancelled at the end: what waits for a dead bus must not keep the agent alive."""
        assert self._tasks is not None  # `run` has begun
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def _fill(self) -> None:
        """Start what is missing, unless the job is over or the machine gets no rank."""
        if self._over.is_set() or self._tenure.drained:
            return
        self._roster, missing = self._roster.missing()
        for place in missing:
            self._spawn(self._launch(place))
        if self._roster.gave_up and not self._roster.places:
            self._spawn(self._despair())
        elif self._roster.gave_up:
            log.error(f"{self._early_deaths()}; no other is started")

    async def _despair(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(VERDICT_WITHIN_S):
                await self._over.wait()
        if self._end is None:
            self._failure = f"{self._early_deaths()}, and none is left"
            self._over.set()

    def _early_deaths(self) -> str:
        return (
            f"{self._roster.early_deaths} workers in a row ended before they were of use (their"
            " output says why)"
        )

    async def _launch(self, place: Place) -> None:
        environment = self._settings.environment(place.worker, place.local_index)
        output = Output(
            place.worker,
            lambda: self._label(place.worker),
            self._show,
            self._settings.log_dir,
            self._shown,
        )
        self._outputs[place.worker] = output
        try:
            pipes = self._workers.launch(place.worker, environment.variables())
        except WarmFailed:
            return  # `_hear` learns of it too, and starts again what was lost
        await output.read(*pipes)

    def _label(self, worker: str) -> str:
        beat = self._beats.get(worker)
        return label(worker, rank=beat.rank if beat else None, phase=beat.phase if beat else "")

    async def _hear(self) -> None:
        """Reports of the warm process, for ever; a dead one is replaced, and so are its workers."""
        deaths = 0
        while True:
            match await self._workers.report():
                case Started(worker=worker, pid=pid):
                    await self._started(worker, pid)
                case Exited(worker=worker, code=code):
                    self._exited(worker, code)
                case Ready():
                    pass
                case None:
                    deaths += 1
                    await self._workers.close()
                    if deaths == MAX_WARM_DEATHS:
                        raise WarmFailed(f"the warm process ended {deaths} times")
                    log.error("the warm process ended and took its workers along")
                    self._workers = await self._open()
                    for worker in tuple(self._roster.places):
                        self._exited(worker, -signal.SIGKILL)

    async def _open(self) -> Workers:
        workers, ready = await Workers.open(self._settings.program, self._settings.shared())
        if ready.threads_from:
            log.warning(
                "workers are spawned, not forked: an import left a second thread",
                module=ready.threads_from,
            )
        return workers

    async def _started(self, worker: str, pid: int) -> None:
        self._roster = self._roster.started(worker, pid)
        place = self._roster.places[worker]
        event = WorkerStarted(
            job=self._settings.job,
            run=self._settings.run,
            worker=worker,
            machine=self._settings.machine,
            local_index=place.local_index,
            pid=pid,
        )
        await self._outbox.put(worker, event, time.time())

    def _exited(self, worker: str, code: int) -> None:
        self._roster = self._roster.exited(worker)
        self._beats.pop(worker, None)
        self._changed.set()
        if not self._exits:
            self._reports = self._spawn(self._report_exits(time.time()))
        self._exits.append(Exit(worker=worker, code=code))

    async def _report_exits(self, time_s: float) -> None:
        """Gather what ends in the same moment, with the last words that are still being read."""
        await asyncio.sleep(EXITS_WITHIN_S)
        exits, self._exits = self._exits, []
        event = WorkerExited(
            job=self._settings.job,
            run=self._settings.run,
            machine=self._settings.machine,
            exits=tuple(
                exit.model_copy(update={"error": self._errors.get(exit.worker)}) for exit in exits
            ),
        )
        await self._outbox.drained(exit.worker for exit in exits)  # the end comes last
        await self._outbox.put(self._settings.machine, event, time_s)
        self._fill()

    # ---- the stream

    async def _follow(self) -> None:
        last = await self._bus.last_seq()
        async for recorded in self._bus.follow():
            event, before = recorded.event, self._tenure
            self._stream.take(recorded, live=recorded.seq >= last)
            for worker, seconds in before.let_go(event).items():
                if worker in self._roster.places:
                    self._spawn(self._reset(worker, seconds))
            self._tenure = before.after(event)
            self._changed.set()
            if isinstance(event, JobCompleted | JobFailed) and not self._over.is_set():
                self._end = event  # after `stop` it only tells what that has led to
                self._over.set()
            if before.drained and not self._tenure.drained:
                self._fill()

    async def _reset(self, worker: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._workers.signal(worker, signal.SIGKILL)

    async def _leave(self) -> None:
        """Until the workers that hold ranks now have given them away and are gone."""
        settings, holders = self._settings, self._tenure.holders
        left_s = max(0.0, settings.grace_s - END_WITHIN_S) if holders else ANNOUNCE_S
        notice = InterruptionAnnounced(
            job=settings.job,
            run=settings.run,
            interruption=f"preempt-{secrets.token_hex(4)}",
            kind="preemption",
            machine=settings.machine,
            deadline=time.time() + left_s,
            reason="SIGTERM",
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._bus.publish(notice)
                while (self._tenure.holders | holders) & self._roster.places.keys():
                    self._changed.clear()
                    await self._changed.wait()
        self._over.set()

    async def _store(self, event: Event, time_s: float) -> None:
        await self._bus.publish(event, time_s=time_s)

    # ---- the end

    async def _wind_down(self) -> None:
        """Wait until workers went by themselves, tell them, make them; then say what is left."""
        if self._end is not None:
            await self._gone_within(self._retire_s(self._end))
        for number in (signal.SIGTERM, signal.SIGKILL):
            for worker in self._roster.places:
                self._workers.signal(worker, number)
            await self._gone_within(TERMINATE_WITHIN_S)
        ends = [output.ended() for output in self._outputs.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                if self._reports is not None:
                    await self._reports
                await asyncio.gather(*ends, self._outbox.all_drained())

    def _retire_s(self, end: JobCompleted | JobFailed) -> float:
        """What workers have to go by themselves; where the job is told to go, for their block."""
        if not isinstance(end, JobFailed) or end.exit_code != TERMINATED:
            return RETIRE_WITHIN_S
        since_s = 0.0 if self._told_at is None else time.monotonic() - self._told_at
        return max(0.0, self._settings.grace_s - END_WITHIN_S - since_s)

    async def _gone_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._roster.places:
                    self._changed.clear()
                    await self._changed.wait()
