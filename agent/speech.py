"""The agent's Unix socket: workers say facts, beats and their last exception, a line each.

Facts are acknowledged when the bus has them; a worker repeats what was not, also over a new
connection, and the agent recognises it by its id.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog
from pydantic import ValidationError

from trainmover.schemas.base import Event
from trainmover.schemas.events import (
    FaultInjected,
    InterruptionAnnounced,
    PeerLost,
    RankReady,
    StandbyMismatched,
    StandbyWarmed,
    StepAborted,
    WorkerFinished,
    WorkerRegistered,
)
from trainmover.schemas.local import LINE, Acknowledged, Beat, Crash, Fact, Hello

SAYABLE: dict[str, type[Event]] = {
    model.TYPE: model
    for model in (
        WorkerRegistered,
        RankReady,
        WorkerFinished,
        PeerLost,
        StepAborted,
        StandbyWarmed,
        StandbyMismatched,
        FaultInjected,
        InterruptionAnnounced,
    )
}
"""What a worker may have published; everything else is the business of others."""

MAX_LINE_BYTES = 1024 * 1024

log = structlog.get_logger(__name__)


class Unfit(ValueError):
    """A fact that no bus would take: what was expected, what came."""


class Hearer(Protocol):
    """Who is told what the workers say."""

    async def on_fact(
        self, worker: str, event: Event, time_s: float, stored: Callable[[], None]
    ) -> None: ...

    def on_beat(self, beat: Beat) -> None: ...

    def on_crash(self, crash: Crash) -> None: ...


@dataclass(slots=True)
class _Speaker:
    """What is known of one worker's facts; outlives its connections."""

    queued: int = -1
    stored: int = -1
    writer: asyncio.StreamWriter | None = field(default=None)

    def acknowledge(self, fact_id: int) -> None:
        self.stored = max(self.stored, fact_id)
        if self.writer is not None and not self.writer.is_closing():
            line = Acknowledged(id=self.stored).model_dump_json() + "\n"
            self.writer.write(line.encode())


def open_fact(fact: Fact, *, worker: str, job: str, run: str) -> Event:
    """The event inside a fact. Raises Unfit."""
    model = SAYABLE.get(fact.type)
    if model is None:
        raise Unfit(f"expected one of {', '.join(SAYABLE)}, came {fact.type!r}")
    try:
        event = model.model_validate_json(fact.payload)
    except ValidationError as error:
        raise Unfit(f"{fact.type}: {error.errors()[0]['msg']}") from error
    said_by = getattr(event, "worker", worker)
    if isinstance(event, InterruptionAnnounced):
        said_by = worker if (event.workers, event.machine) == ((worker,), None) else "others too"
    if (event.job, event.run, said_by) != (job, run, worker):
        raise Unfit(
            f"expected {fact.type} of job {job}, run {run}, worker {worker},"
            f" came job {event.job}, run {event.run}, worker {said_by}"
        )
    return event


class Speech:
    """Serves the socket; one instance per agent."""

    def __init__(self, hearer: Hearer, *, job: str, run: str) -> None:
        self._hearer = hearer
        self._job = job
        self._run = run
        self._speakers: dict[str, _Speaker] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, path: str) -> asyncio.Server:
        """Listen at `path` (107 bytes at most) until the server is closed."""
        return await asyncio.start_unix_server(self._accept, path, limit=MAX_LINE_BYTES)

    async def hush(self) -> None:
        """End every conversation."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._converse(reader, writer)
        except (ValidationError, ValueError) as error:
            log.warning("a worker's line is not understood; its connection ends", error=str(error))
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = LINE.validate_json(await reader.readline() or b"null")
        if not isinstance(hello, Hello):
            raise ValueError(f"expected hello as the first line, came {hello.kind}")
        speaker = self._speakers.setdefault(hello.worker, _Speaker())
        speaker.writer = writer
        while line := await reader.readline():
            match LINE.validate_json(line):
                case Hello():
                    pass
                case Beat(worker=worker) as beat if worker == hello.worker:
                    self._hearer.on_beat(beat)
                case Crash(worker=worker) as crash if worker == hello.worker:
                    self._hearer.on_crash(crash)
                case Fact() as fact:
                    await self._take(fact, hello.worker, speaker)
                case other:
                    raise ValueError(f"{other.kind} of another worker than {hello.worker}")

    async def _take(self, fact: Fact, worker: str, speaker: _Speaker) -> None:
        if fact.id <= speaker.stored:
            speaker.acknowledge(fact.id)
        if fact.id <= speaker.queued:
            return
        speaker.queued = fact.id
        try:
            event = open_fact(fact, worker=worker, job=self._job, run=self._run)
        except Unfit as error:
            log.error("a worker's fact is dropped", worker=worker, error=str(error))
            return
        await self._hearer.on_fact(worker, event, fact.time, lambda: speaker.acknowledge(fact.id))
