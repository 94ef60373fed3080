"""Detector, planner and mover as children of this process, started again when they die."""

import asyncio
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import structlog

from trainmover.bus.lifeline import die_with

SERVICES = ("detector", "planner", "mover")
MAX_DEATHS = 5
WITHIN_S = 30.0
AGAIN_AFTER_S = 0.2
"""Before a dead one is started again: a moment for what killed it to pass."""
TERMINATE_WITHIN_S = 1.0
TAIL_BYTES = 2000

log = structlog.get_logger(__name__)


class ServiceFailed(RuntimeError):
    """A service dies again and again."""


async def supervise(name: str, environment: Mapping[str, str], log_file: Path) -> None:
    """Keep one service running until its job is over; its state is the stream, so it may die.

    `environment`: what it must know of the job, secret and bus included, so that neither stands
    on a command line. Raises ServiceFailed after `MAX_DEATHS` within `WITHIN_S`.
    """
    deaths: deque[float] = deque(maxlen=MAX_DEATHS)
    while True:
        code = await _run(name, environment, log_file)
        if code == 0:
            return
        deaths.append(time.monotonic())
        if len(deaths) == MAX_DEATHS and deaths[-1] - deaths[0] < WITHIN_S:
            raise ServiceFailed(
                f"{name} ended {MAX_DEATHS} times within {WITHIN_S:g} s, last with code {code}:\n"
                + _tail(log_file)
            )
        log.warning("service is started again", service=name, code=code)
        await asyncio.sleep(AGAIN_AFTER_S)


def environment(*, bus: str, job: str, run: str, secret: str) -> dict[str, str]:
    """What services read instead of flags."""
    names = {"BUS": bus, "JOB": job, "RUN": run, "SECRET": secret}
    return {f"TRAINMOVER_{name}": value for name, value in names.items()}


async def _run(name: str, environment: Mapping[str, str], log_file: Path) -> int:
    with log_file.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"trainmover.services.{name}",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
            process_group=0,  # Ctrl-C reaches `run` only, which ends them in order
            preexec_fn=partial(die_with, os.getpid()),
        )
    try:
        return await process.wait()
    finally:
        if process.returncode is None:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), TERMINATE_WITHIN_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _tail(log_file: Path) -> str:
    return log_file.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
