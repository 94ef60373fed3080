"""The bus of one machine's job: a server beside it, started again when it dies."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import structlog

from trainmover.bus.server import EmbeddedServer

AGAIN_AFTER_S = 0.2

log = structlog.get_logger(__name__)


@contextlib.asynccontextmanager
async def server(store_dir: Path) -> AsyncIterator[str]:
    """URL of a server that runs inside the block. Raises bus.server.ServerFailed."""
    embedded = EmbeddedServer(store_dir, token=secrets.token_hex(16))
    await embedded.start()
    keeper = asyncio.create_task(_keep(embedded))
    try:
        yield embedded.url
    finally:
        keeper.cancel()
        await asyncio.wait([keeper])
        await embedded.stop()


async def _keep(embedded: EmbeddedServer) -> None:
    """Training goes on without the bus, and who publishes waits: start it again, for ever."""
    while True:
        code = await embedded.wait()
        log.warning("the bus ended and is started again", code=code)
        await asyncio.sleep(AGAIN_AFTER_S)
        await embedded.start()
