"""One agent per machine: keeps its workers alive, says what becomes of them, ends them in order.

Losing an agent is losing its machine: its workers die with it.
"""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Coroutine, Iterable

import structlog

from trainmover.agent import telemetry
from trainmover.agent.orders import Exited, Ready, Started
from trainmover.agent.outbox import Outbox
from trainmover.agent.output import Output, Show, label, show_plain
from trainmover.agent.roster import Place, Roster
from trainmover.agent.settings import Settings
from trainmover.agent.speech import Speech
from trainmover.agent.workers import WarmFailed, Workers
from trainmover.bus.job import JobBus
from trainmover.schemas.base import Event
from trainmover.schemas.events import (
    Exit,
    FaultInjected,
    JobCompleted,
    JobFailed,
    MigrationPlanned,
    MigrationSwitched,
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
LEAVER_LINGERS_S = 0.5
"""A replaced worker is killed after this: it may be stopped or hung (commit.md, RESET)."""
RETIRE_WITHIN_S = 5.0
"""After the end of the job the mover retires workers; then they are told, then made, to go. Who
gave its rank away is killed after that time."""
TERMINATE_WITHIN_S = 2.0
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
        self._giving: dict[int, tuple[str, ...]] = {}
        """Planned generation -> who gives its rank away when that is switched to."""
        self._news = asyncio.Event()
        self._changed = asyncio.Event()
        self._over = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._end: JobCompleted | JobFailed | None = None
        self._failure: str = ""

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
        if isinstance(event, RankReady | StandbyWarmed) and worker in self._roster.places:
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

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        """It is cancelled at the end: what waits for a dead bus must not keep the agent alive."""
        task = self._tasks.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _fill(self) -> None:
        """Start what is missing, unless the job is over."""
        if self._over.is_set():
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
            self._spawn(self._report_exits(time.time()))
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
            self._stream.take(recorded, live=recorded.seq >= last)
            match recorded.event:
                case JobCompleted() | JobFailed() as end:
                    self._end = end
                    self._over.set()
                case MigrationPlanned(kind="planned") as plan:
                    self._giving = {plan.generation: tuple(m.worker for m in plan.leavers)}
                case MigrationPlanned(replacements=replacements):
                    self._let_go((r.leaver for r in replacements), LEAVER_LINGERS_S)
                case MigrationSwitched(generation=generation):
                    self._let_go(self._giving.get(generation, ()), RETIRE_WITHIN_S)
                case _:
                    pass

    def _let_go(self, leavers: Iterable[str], after_s: float) -> None:
        for leaver in leavers:
            if leaver in self._roster.places:
                self._spawn(self._reset(leaver, after_s))

    async def _reset(self, leaver: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._workers.signal(leaver, signal.SIGKILL)

    async def _store(self, event: Event, time_s: float) -> None:
        await self._bus.publish(event, time_s=time_s)

    # ---- the end

    async def _wind_down(self) -> None:
        """Wait until workers went by themselves, tell them, make them; then say what is left."""
        if self._end is not None:
            await self._gone_within(RETIRE_WITHIN_S)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for worker in self._roster.places:
                self._workers.signal(worker, number)
            await self._gone_within(TERMINATE_WITHIN_S)
        ends = [output.ended() for output in self._outputs.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.gather(*ends, self._outbox.all_drained())

    async def _gone_within(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._roster.places:
                    self._changed.clear()
                    await self._changed.wait()
