"""The one loop of every service: read the stream, evolve, decide, publish and ask.

State is a fold over the stream and is kept nowhere else. Until the stream's end at the start is
reached nothing is decided; then after every event, answer, telemetry and tick, whatever is queued
being taken in first. An output that got lost, here or with a killed copy, is decided again.
"""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

import structlog

from trainmover.bus.job import JobBus, Skipped
from trainmover.bus.port import BusError, Unanswered
from trainmover.schemas import subjects
from trainmover.schemas.base import Event
from trainmover.schemas.commands import ANSWER_WITHIN_S, Answer, AnyCommand
from trainmover.schemas.events import ONCE_ONLY, JobCompleted, JobFailed
from trainmover.schemas.local import Telemetry
from trainmover.schemas.recorded import Recorded
from trainmover.services.contract import Ask, Inputs, Service
from trainmover.telemetry.stream import StreamTracer

log = structlog.get_logger()
S = TypeVar("S")

ASK_S = ANSWER_WITHIN_S + 1.0
PACE_S = 0.05
"""An equal command is not repeated sooner after an answer that came at once."""
REFUSED_S = 1.0
"""A publish that was refused is not repeated sooner."""
MAX_QUEUED = 1000


class ServiceBug(RuntimeError):
    """`evolve` or `decide` raised: they are total functions. A restart folds the stream anew."""


async def run(
    service: Service[S],
    bus: JobBus,
    stream: StreamTracer,
    *,
    stop: asyncio.Event,
    tick_s: float = 0.1,
    linger_s: float = 5.0,
) -> None:
    """Serve until `stop`, or `linger_s` after the end of the job (the last workers retire).

    Raises ServiceBug, and BusClosed when the connection is over for good.
    """
    shell = _Shell(service, bus, stream)
    shell.spawn(shell.read())
    try:
        while not stop.is_set() and not shell.ended_for(linger_s):
            await shell.wait(tick_s)
            shell.take_in()
            if shell.caught_up:
                shell.decide()
    finally:
        await shell.end()


class _Clock:
    """The stream's clock: time of the last event plus what passed here since it came."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def set(self, stream_s: float, came: float) -> None:
        """An event of `stream_s` came here at `came` (monotonic)."""
        self._offset_s = stream_s - came

    def at(self, monotonic: float) -> float:
        return monotonic + self._offset_s


class _Shell(Generic[S]):
    def __init__(self, service: Service[S], bus: JobBus, stream: StreamTracer) -> None:
        self._service = service
        self._bus = bus
        self._stream = stream
        self._state = service.initial
        self._seq = 0
        self._until: int | None = None
        """Seq of the stream's end at the start."""
        self._clock = _Clock()
        self._arrived: asyncio.Queue[tuple[Recorded | Skipped, float]] = asyncio.Queue(MAX_QUEUED)
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._started = time.monotonic()
        self._ended: float | None = None
        self._heard: dict[str, float] = {}
        self._last_seqs: dict[str, int] = {}
        """Subject -> seq of its last message that was taken in, acceptable or not."""
        self._published: set[str] = set()
        """Identities on their way or stored by this copy."""
        self._asks: dict[str, _Line] = {}
        self._answers: dict[str, Answer] = {}

    # ---- in

    async def read(self) -> None:
        await self._bus.on_telemetry(self._hear)
        self._until = await self._bus.last_seq()
        self._wake.set()
        async for item in self._bus.read():
            await self._arrived.put((item, time.monotonic()))
            self._wake.set()

    async def _hear(self, telemetry: Telemetry) -> None:
        self._heard[telemetry.machine] = time.monotonic()
        self._wake.set()

    async def wait(self, tick_s: float) -> None:
        try:
            async with asyncio.timeout(tick_s):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()
        if self._failure is not None:
            raise self._failure

    @property
    def caught_up(self) -> bool:
        return self._until is not None and self._seq >= self._until

    def take_in(self) -> None:
        """Evolve everything that is queued."""
        while not self._arrived.empty():
            item, came = self._arrived.get_nowait()
            self._seq = item.seq
            if isinstance(item, Skipped):
                self._last_seqs[item.subject] = item.seq
                continue
            self._last_seqs[subjects.event(self._bus.job, item.event)] = item.seq
            self._clock.set(item.time_s, came)
            try:
                self._state = self._service.evolve(self._state, item)
            except Exception as error:
                raise ServiceBug(
                    f"{self._service.name}: evolve failed on seq {item.seq}, {item.event!r}"
                ) from error
            self._stream.take(item, live=self.caught_up)
            if isinstance(item.event, JobCompleted | JobFailed):
                self._ended = came

    def ended_for(self, linger_s: float) -> bool:
        return self._ended is not None and time.monotonic() - self._ended >= linger_s

    # ---- out

    def decide(self) -> None:
        inputs = Inputs(
            now_s=self._clock.at(time.monotonic()),
            up_since_s=self._clock.at(max(self._bus.up_since, self._started)),
            heard={machine: self._clock.at(when) for machine, when in self._heard.items()},
            answers=dict(self._answers),
        )
        try:
            outputs = self._service.decide(self._state, inputs)
        except Exception as error:
            raise ServiceBug(
                f"{self._service.name}: decide failed after seq {self._seq} with {inputs!r}"
            ) from error
        for output in outputs:
            if isinstance(output, Ask):
                self._ask(output.worker, output.command)
            elif output.identity() not in self._published:
                self._published.add(output.identity())
                last_seq = self._last_seqs.get(subjects.event(self._bus.job, output), 0)
                self.spawn(self._publish(output, last_seq))

    async def _publish(self, event: Event, last_seq: int) -> None:
        """`last_seq` is that of the decision's moment: what came since makes it a conflict."""
        try:
            if event.TYPE not in ONCE_ONLY:
                await self._bus.publish(event)
            elif not await self._bus.publish_once(event, last_subject_seq=last_seq):
                self._published.discard(event.identity())  # read on, then decide again
        except BusError as error:
            log.error("service.publish_failed", type=event.TYPE, error=str(error))
            await asyncio.sleep(REFUSED_S)
            self._published.discard(event.identity())

    def _ask(self, worker: str, command: AnyCommand) -> None:
        """One is under way per worker; what is dropped here is decided again when it is over."""
        line = self._asks.get(worker)
        if line is None:
            line = self._asks[worker] = _Line()
        if line.may_send(command):
            line.sent(command)
            self.spawn(self._converse(worker, command, line))

    async def _converse(self, worker: str, command: AnyCommand, line: "_Line") -> None:
        try:
            self._answers[worker] = await self._bus.ask(worker, command, timeout_s=ASK_S)
        except Unanswered as why:
            log.debug("service.unanswered", worker=worker, command=command.kind, reason=str(why))
        finally:
            self._wake.set()
            if pause_s := line.over():
                asyncio.get_running_loop().call_later(pause_s, self._wake.set)

    # ---- tasks

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            self._wake.set()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Line:
    """The conversation with one worker: what was sent last, and when it may be sent again."""

    def __init__(self) -> None:
        self._command: AnyCommand | None = None
        self._busy = False
        self._sent = 0.0
        self._pause_until = 0.0

    def may_send(self, command: AnyCommand) -> bool:
        paused = command == self._command and time.monotonic() < self._pause_until
        return not self._busy and not paused

    def sent(self, command: AnyCommand) -> None:
        self._command, self._busy, self._sent = command, True, time.monotonic()

    def over(self) -> float:
        """Seconds until an equal command may follow: none after one that took its time."""
        now = time.monotonic()
        pause_s = PACE_S if now - self._sent < PACE_S else 0.0
        self._busy, self._pause_until = False, now + pause_s
        return pause_s
