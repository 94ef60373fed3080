"""Durable facts of a machine on their way to the bus: in order, bounded, sent until stored."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from trainmover.bus.port import Refused
from trainmover.schemas.base import Event

MAX_WAITING = 4096
"""A bus that is away for long makes workers wait here, and they keep their own facts."""

log = structlog.get_logger(__name__)

Publish = Callable[[Event, float], Awaitable[object]]
"""Waits while the bus is away. A redelivery is harmless: a fact's identity is its message id."""


@dataclass(frozen=True, slots=True)
class _Letter:
    event: Event
    time_s: float
    stored: Callable[[], None]


class Outbox:
    """One writer for the machine's facts: a worker's arrive in the order they were put."""

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._letters: asyncio.Queue[_Letter] = asyncio.Queue(MAX_WAITING)

    async def put(
        self, event: Event, time_s: float, stored: Callable[[], None] = lambda: None
    ) -> None:
        """Queue a fact; `stored` is called when the bus has it. Blocks while the box is full."""
        await self._letters.put(_Letter(event, time_s, stored))

    async def run(self) -> None:
        """Publish for ever."""
        while True:
            letter = await self._letters.get()
            try:
                await self._publish(letter.event, letter.time_s)
                letter.stored()
            except Refused as error:
                log.error("the bus refuses a fact", fact=letter.event.TYPE, error=str(error))
            finally:
                self._letters.task_done()

    async def drained(self) -> None:
        """Blocks until every queued fact is stored; the caller sets the deadline."""
        await self._letters.join()
