"""What a machine tells of its workers: one message an interval, and at once what is news."""

import asyncio
import contextlib
from collections.abc import Mapping

from trainmover.bus.job import JobBus
from trainmover.schemas.local import Beat, Telemetry

INTERVAL_S = 0.5
NEWS_S = 0.1
"""A change of phase is told at once, but not more often than this."""


async def tell(bus: JobBus, machine: str, beats: Mapping[str, Beat], news: asyncio.Event) -> None:
    """For ever. `beats`: the latest of each live worker; `news` is set when one is urgent."""
    while True:
        telemetry = Telemetry(
            job=bus.job,
            run=bus.run,
            machine=machine,
            interval_s=INTERVAL_S,
            workers=tuple(beats.values()),
        )
        news.clear()
        with contextlib.suppress(OSError, TimeoutError):  # the next one is sent anyway
            await bus.telemetry(telemetry)
        await asyncio.sleep(NEWS_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(INTERVAL_S - NEWS_S):
                await news.wait()
