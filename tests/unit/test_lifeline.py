"""A child is ended for certain, and may end by itself at any moment of that."""

import asyncio
import sys
from typing import cast

import pytest

from trainmover.bus import lifeline


class JustEnded:
    """Its end is not known to asyncio before it is asked to die."""

    def __init__(self) -> None:
        self._known = asyncio.Event()

    def terminate(self) -> None:
        raise ProcessLookupError

    def kill(self) -> None:
        self._known.set()
        raise ProcessLookupError

    async def wait(self) -> int:
        await self._known.wait()
        return 0


async def test_a_child_that_ends_while_it_is_ended_is_no_error() -> None:
    async with asyncio.timeout(10):
        await lifeline.end(cast(asyncio.subprocess.Process, JustEnded()), within_s=0.01)


@pytest.mark.parametrize(("deaf", "code"), [("SIG_DFL", -15), ("SIG_IGN", -9)])
async def test_a_child_is_asked_to_end_and_killed_if_it_does_not(deaf: str, code: int) -> None:
    program = f"import signal, sys; signal.signal(15, signal.{deaf}); print(); signal.pause()"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-uc", program, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()
    await lifeline.end(process, within_s=10 if code == -15 else 0.1)
    assert process.returncode == code
