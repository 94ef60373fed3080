"""Detector, planner and mover as children of this process, started again when they die."""

import asyncio
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog

from trainmover.bus.lifeline import die_with, end

SERVICES = ("detector", "planner", "mover")
MAX_DEATHS = 5
WITHIN_S = 30.0
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Who is ended by one of these did nothing wrong and goes on where it was, however often."""
AGAIN_AFTER_S = 0.2
"""Before a dead one is started again: a moment for what killed it to pass."""
TERMINATE_WITHIN_S = 1.0
TAIL_BYTES = 2000

log = structlog.get_logger(__name__)


class ServiceFailed(RuntimeError):
    """A service dies again and again."""


@dataclass(slots=True)
class Deaths:
    """Of one service: tells a crash loop from deaths that others cause."""

    _own_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_DEATHS))

    def in_a_loop(self, code: int, now_s: float) -> bool:
        """Note that it ended with `code`; whether it did so by itself too often within `WITHIN_S`.

        `code`: the exit code, or minus the number of the signal that ended it.
        """
        if any(code in (-number, 128 + number) for number in FROM_OUTSIDE):
            return False
        self._own_s.append(now_s)
        return len(self._own_s) == MAX_DEATHS and now_s - self._own_s[0] < WITHIN_S


async def supervise(name: str, environment: Mapping[str, str], log_file: Path) -> None:
    """Keep one service running until its job is over; its state is the stream, so it may die.

    `environment`: what it must know of the job, secret and bus included, so that neither stands
    on a command line. Raises ServiceFailed after `MAX_DEATHS` of its own within `WITHIN_S`.
    """
    deaths = Deaths()
    while True:
        code = await _run(name, environment, log_file)
        if code == 0:
            return
        if deaths.in_a_loop(code, time.monotonic()):
            raise ServiceFailed(
                f"{name} ended {MAX_DEATHS} times by itself within {WITHIN_S:g} s, last with code"
                f" {code}:\n{_tail(log_file)}"
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
            await end(process, TERMINATE_WITHIN_S)


def _tail(log_file: Path) -> str:
    return log_file.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
