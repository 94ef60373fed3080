"""The agent's end of the warm process: launch workers, signal them, hear of their exits."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping
from functools import partial
from typing import Self

from trainmover.agent.orders import (
    MAX_BYTES,
    REPORT,
    Exited,
    Program,
    Ready,
    Signal,
    Start,
    Started,
)
from trainmover.bus.lifeline import die_with, gone

IMPORT_WITHIN_S = 300.0
"""A cold import of torch from a network file system takes minutes, not more."""
CLOSE_WITHIN_S = 2.0


class WarmFailed(RuntimeError):
    """The warm process ended or did not get ready."""


class Workers:
    """One warm process and the workers it forked. Not thread-safe; one event loop."""

    def __init__(self, process: asyncio.subprocess.Process, channel: socket.socket) -> None:
        self._process = process
        self._channel = channel

    @classmethod
    async def open(cls, program: Program, variables: Mapping[str, str]) -> tuple[Self, Ready]:
        """Start the warm process and wait until its imports are done.

        `variables` are added to the environment of it and of every worker. Raises WarmFailed.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        fd = theirs.fileno()
        argv = ("-m", "trainmover.agent.warm", str(fd), program.model_dump_json())
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, **variables},
            pass_fds=(fd,),
            process_group=0,  # Ctrl-C reaches the agent only
            preexec_fn=partial(die_with, os.getpid()),
        )
        theirs.close()
        workers = cls(process, ours)
        try:
            report = await asyncio.wait_for(workers.report(), IMPORT_WITHIN_S)
        except TimeoutError:
            await workers.close()
            raise WarmFailed(
                f"the imports of {program.script} were not done after {IMPORT_WITHIN_S:.0f} s"
            ) from None
        if not isinstance(report, Ready):
            code = await process.wait()
            raise WarmFailed(f"the warm process ended with code {code} during its imports")
        return workers, report

    async def report(self) -> Ready | Started | Exited | None:
        """The next report; None when the warm process, and with it every worker, is gone."""
        data = await asyncio.get_running_loop().sock_recv(self._channel, MAX_BYTES)
        return REPORT.validate_json(data) if data else None

    def launch(self, worker: str, variables: Mapping[str, str]) -> tuple[int, int]:
        """Order a worker; returns the read ends of its stdout and stderr. Raises WarmFailed."""
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        order = Start(worker=worker, variables=dict(variables)).model_dump_json().encode()
        try:
            socket.send_fds(self._channel, [order], [out_write, err_write])
        except OSError as error:
            os.close(out_read)
            os.close(err_read)
            raise WarmFailed(f"the warm process takes no orders: {error}") from error
        finally:
            os.close(out_write)
            os.close(err_write)
        return out_read, err_read

    def signal(self, worker: str, number: signal.Signals) -> None:
        """Send a signal to a worker; nothing happens when it has exited."""
        try:
            self._channel.send(Signal(worker=worker, number=number).model_dump_json().encode())
        except OSError:
            return  # the warm process is gone, and its workers with it

    async def close(self) -> None:
        """End the warm process and every worker that is left; killed after `CLOSE_WITHIN_S`."""
        self._channel.close()
        await gone(self._process, CLOSE_WITHIN_S)
