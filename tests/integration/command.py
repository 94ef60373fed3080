"""`trainmover run` as a person starts it: what it prints, its exit code, and what it leaves."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

TRAINMOVER = (sys.executable, "-m", "trainmover.cli.main")
ORPHANS_WITHIN_S = 5.0
"""Whatever carries the job in its environment so long after the end is an orphan."""


@dataclass(frozen=True)
class Outcome:
    code: int
    output: str
    seconds: float

    def said(self, text: str) -> int:
        """How often."""
        return self.output.count(text)


class Command:
    """One `run`. Use as a context manager: whatever happens, nothing of it stays."""

    def __init__(self, folder: Path, *arguments: str, job: str = "", **variables: str) -> None:
        self.folder = folder
        self.job = job or f"t{os.getpid()}-{time.monotonic_ns() % 10**9}"
        self.environment = {
            **os.environ,
            "XDG_RUNTIME_DIR": str(folder),
            "PYTHONUNBUFFERED": "1",
            **variables,
        }
        self._command = (*TRAINMOVER, "run", "--job", self.job, *arguments)

    def __enter__(self) -> "Command":
        self._started_s = time.monotonic()
        self._file = (self.folder / f"output-{self.job}-{time.monotonic_ns()}").open("w+")
        self.process = subprocess.Popen(
            self._command,
            env=self.environment,
            cwd=self.folder,
            stdout=self._file,
            stderr=subprocess.STDOUT,
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._file.close()

    def output(self) -> str:
        return Path(self._file.name).read_text()

    def wait_for(self, text: str, timeout_s: float = 60) -> None:
        """Blocks until the output has it."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise AssertionError(f"waited in vain for {text!r}\n{self.output()[-6000:]}")
            time.sleep(0.02)

    def finish(self, timeout_s: float = 60, *, alone: bool = True) -> Outcome:
        """Its end, and that it left no process if it was `alone` in its job."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it hangs\n{self.output()[-6000:]}") from None
        outcome = Outcome(code, self.output(), time.monotonic() - self._started_s)
        deadline = time.monotonic() + ORPHANS_WITHIN_S
        while alone and (left := carriers(self.job)):
            assert time.monotonic() < deadline, f"orphans: {left}\n{outcome.output[-6000:]}"
            time.sleep(0.05)
        return outcome


def run(folder: Path, *arguments: str, job: str = "", **variables: str) -> Outcome:
    """A run of its own, or one that tries to join `job`."""
    with Command(folder, *arguments, job=job, **variables) as command:
        return command.finish(alone=not job)


def carriers(job: str) -> dict[int, str]:
    """Pid -> command line of the live processes that have the job in their environment."""
    mark = f"TRAINMOVER_JOB={job}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue  # it has ended, or is another user's
    return found
