"""The bus of one machine's job: a server beside it, started again when it dies."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path

import structlog
import tenacity

from trainmover.bus.server import EmbeddedServer, ServerFailed

GIVE_UP_S = 300.0
"""Of starting it again: without it no failure is survived and no end of the job is known."""

log = structlog.get_logger(__name__)


@contextlib.asynccontextmanager
async def server(store_dir: Path) -> AsyncIterator[str]:
    """URL of a server that runs inside the block, on one store and port whatever kills it.

    Raises bus.server.ServerFailed, inside a group when it cannot be started again.
    """
    embedded = EmbeddedServer(store_dir, token=secrets.token_hex(16))
    await embedded.start()
    try:
        async with asyncio.TaskGroup() as group:
            keeper = group.create_task(_keep(embedded))
            yield embedded.url
            keeper.cancel()
    finally:
        await embedded.stop()


async def _keep(embedded: EmbeddedServer) -> None:
    """For ever: training goes on without the bus, and who publishes waits for it."""
    again = tenacity.AsyncRetrying(
        retry=tenacity.retry_if_exception_type(ServerFailed),
        wait=tenacity.wait_exponential(0.2, max=10.0),
        stop=tenacity.stop_after_delay(GIVE_UP_S),
        before_sleep=_say,
        reraise=True,
    )
    while True:
        code = await embedded.wait()
        log.warning("the bus ended and is started again; training goes on meanwhile", code=code)
        began_s = time.monotonic()
        await again(embedded.start)
        log.warning("the bus is back", after_s=round(time.monotonic() - began_s, 1))


def _say(attempt: tenacity.RetryCallState) -> None:
    error = attempt.outcome.exception() if attempt.outcome else None
    log.warning("the bus does not start", error=str(error), gives_up_after_s=GIVE_UP_S)
