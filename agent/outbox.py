"""Durable facts of a machine on their way to the bus: bounded, in order, sent until stored.

Each worker, and the agent itself, has a lane of its own: the exit that explains everything does
not wait behind what all its peers say about it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import structlog

from trainmover.bus.port import Refused
from trainmover.schemas.base import Event

MAX_WAITING = 1024
"""A bus that is away for long makes a worker wait here, and it keeps its own facts."""

log = structlog.get_logger(__name__)

Publish = Callable[[Event, float], Awaitable[object]]
"""Waits while the bus is away. A redelivery is harmless: a fact's identity is its message id."""


@dataclass(frozen=True, slots=True)
class _Letter:
    event: Event
    time_s: float
    stored: Callable[[], None]


class Outbox:
    """Its senders live in the event loop until `close`."""

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._lanes: dict[str, asyncio.Queue[_Letter]] = {}
        self._senders: list[asyncio.Task[None]] = []

    async def put(
        self, lane: str, event: Event, time_s: float, stored: Callable[[], None] = lambda: None
    ) -> None:
        """Queue a fact; `stored` is called when the bus has it. Blocks while the lane is full.

        Facts of one lane are stored in the order they were put.
        """
        if lane not in self._lanes:
            self._lanes[lane] = asyncio.Queue(MAX_WAITING)
            self._senders.append(asyncio.create_task(self._send(self._lanes[lane])))
        await self._lanes[lane].put(_Letter(event, time_s, stored))

    async def drained(self, lanes: Iterable[str]) -> None:
        """Blocks until all that is queued in these lanes is stored."""
        for lane in lanes:
            if lane in self._lanes:
                await self._lanes[lane].join()

    async def all_drained(self) -> None:
        """Blocks until all that is queued is stored; the caller sets the deadline."""
        await self.drained(tuple(self._lanes))

    async def close(self) -> None:
        """What is still queued is lost."""
        for sender in self._senders:
            sender.cancel()
        await asyncio.gather(*self._senders, return_exceptions=True)

    async def _send(self, letters: asyncio.Queue[_Letter]) -> None:
        while True:
            letter = await letters.get()
            try:
                await self._publish(letter.event, letter.time_s)
                letter.stored()
            except Refused as error:
                log.error("the bus refuses a fact", fact=letter.event.TYPE, error=str(error))
            finally:
                letters.task_done()
