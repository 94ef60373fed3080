"""Processes that a system consists of: started in groups of their own, ended by their ids."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

END_S = 40.0
"""torchrun gives its ranks 30 s."""


class Child:
    """A process whose output goes to a file."""

    def __init__(self, command: Sequence[object], env: dict[str, str], log: Path) -> None:
        self.log = log
        self.process = _start(command, env, log)

    def ended(self) -> str:
        """Empty while it runs, else what can be said of its end."""
        code = self.process.poll()
        return "" if code is None else f"ended with {code}, see {self.log}"

    def stop(self) -> None:
        """SIGTERM, and SIGKILL to all of its group after END_S. Blocks until it is gone."""
        _stop(self.process)


class Supervised:
    """A process that is started again at once whenever it ends."""

    def __init__(self, command: Sequence[object], env: dict[str, str], log: Path) -> None:
        self.starts: list[float] = []
        """Seconds since 1970."""
        self.starts: list[float] = []
        """Seconds since 1970."""
        self.lock = threading.Lock()
        self.stopping = False
        self.command, self.env, self.log = command, env, log
        self.process = self._again()
        self.thread = threading.Thread(target=self._supervise, daemon=True)
        self.thread.start()

    def _again(self) -> "subprocess.Popen[bytes]":
        self.starts.append(time.time())
        return _start(self.command, self.env, self.log)

    def _supervise(self) -> None:
        while True:
            self.process.wait()
            with self.lock:
                if self.stopping:
                    return
                self.process = self._again()

    def stop(self) -> None:
        with self.lock:
            self.stopping = True
        _stop(self.process)
        self.thread.join(END_S)


def _start(command: Sequence[object], env: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
    with log.open("ab") as output:
        return subprocess.Popen(
            [str(word) for word in command],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(END_S)
