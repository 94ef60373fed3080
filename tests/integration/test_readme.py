"""What the documents tell people to run is run, as it stands there.

Only what a reader fills in too is filled in: addresses, folders, the secret; and a machine with
two cores gets fewer ranks.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.chaos.job import Finished, Job
from tests.documents import run_by

NUM_STEPS = 200
BIN = Path(sys.executable).parent

pytestmark = [pytest.mark.concurrent, pytest.mark.full, pytest.mark.timeout(300)]


class Terminal:
    """A bash that runs one block in `folder`. Use as a context manager: nothing of it stays."""

    def __init__(self, folder: Path, block: str, **variables: str) -> None:
        self._block, self._folder = block, folder
        self._variables = {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "XDG_RUNTIME_DIR": str(folder),
            "PYTHONUNBUFFERED": "1",
            **variables,
        }

    def __enter__(self) -> "Terminal":
        self._file = (self._folder / f"terminal-{time.monotonic_ns()}").open("w+")
        self.process = subprocess.Popen(
            ["bash", "-euc", self._block],
            cwd=self._folder,
            env=self._variables,
            stdin=subprocess.DEVNULL,
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self._file.close()

    def output(self) -> str:
        return Path(self._file.name).read_text()

    def wait_for(self, text: str, timeout_s: float = 90) -> None:
        self._wait(f"waits in vain for {text!r}", lambda: text in self.output(), timeout_s)

    def finish(self, timeout_s: float = 180) -> str:
        """Its output, after it has ended with exit code 0."""
        ended = self.process.poll
        self._wait("does not end", lambda: ended() is not None, timeout_s)
        assert self.process.returncode == 0, self.output()[-6000:]
        return self.output()

    def _wait(self, what: str, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            over = self.process.poll() is not None or time.monotonic() > deadline
            assert not over or condition(), f"{what}\n{self.output()[-6000:]}"
            time.sleep(0.02)


@dataclass(frozen=True)
class Ran:
    finished: Finished
    watched: str


def script() -> str:
    (text,) = run_by("test_the_script_of_the_readme_survives_a_kill")
    return text


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The README's script with rank 1 killed in step 50, watched from outside."""
    folder = tmp_path_factory.mktemp("readme")
    (watcher,) = run_by("test_the_watcher_of_the_manual_sees_every_event")
    (folder / "train.py").write_text(script())
    (folder / "watch.py").write_text(watcher)
    (folder / "faults").write_text("kill:rank=1,step=50,at=backward\n")
    with Job(folder, str(folder / "train.py")) as job:
        job.wait_for("the submission", lambda: bool(job.of("job.submitted")))
        session = json.loads((folder / "xdg" / "trainmover" / f"{job.name}.json").read_text())
        known = {f"TRAINMOVER_{k.upper()}": session[k] for k in ("job", "secret")}
        watched = subprocess.run(
            [sys.executable, str(folder / "watch.py")],
            env={**os.environ, **known, "TRAINMOVER_BUS": session["url"]},
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
        )
        return Ran(job.finish(), watched.stdout)


def test_the_script_of_the_readme_survives_a_kill(ran: Ran) -> None:
    assert ran.finished.code == 0, ran.finished.output
    assert ran.finished.report["completed_steps"] == NUM_STEPS
    (incident,) = ran.finished.report["incidents"]
    assert (incident["outcome"], incident["ranks"]) == ("completed", [1])


def test_the_watcher_of_the_manual_sees_every_event(ran: Ran) -> None:
    kinds = [line.split()[1] for line in ran.watched.splitlines()]
    assert kinds[0] == "trainmover.job.submitted.v1"
    assert "trainmover.migration.completed.v1" in kinds
    assert kinds[-1] == "trainmover.job.completed.v1"
    assert "not signed" not in ran.watched


def test_the_commands_for_one_machine(tmp_path: Path) -> None:
    run, beside = run_by("test_the_commands_for_one_machine")
    longer = script().replace(f"ctx.steps({NUM_STEPS})", "ctx.steps(800)")
    (tmp_path / "train.py").write_text(longer)  # the commands beside it take seconds
    with Terminal(tmp_path, run) as job:
        job.wait_for(": step ")
        with Terminal(tmp_path, beside) as second:
            told = second.finish()
        said = job.finish()
    for said_beside in ("rank 1", "migration.completed", "job.completed"):
        assert said_beside in told
    assert "incident g2 (crash, completed): rank 1" in said


def test_the_commands_for_several_machines(tmp_path: Path) -> None:
    bus, services, machine = run_by("test_the_commands_for_several_machines")
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]

    def filled(block: str) -> str:
        for written, meant in {
            "nats-server -js": f"nats-server -js -a 127.0.0.1 -p {port}",
            "/var/lib/trainmover": str(tmp_path / "store"),
            "bus-host:4222": f"127.0.0.1:{port}",
            "SECRET=...": f"SECRET={secret}",
            "--nproc-per-node 4": "--nproc-per-node 1",
        }.items():
            block = block.replace(written, meant)
        return block

    secret = secrets.token_hex(32)
    machines = {name: tmp_path / name for name in ("a", "b")}
    for folder in machines.values():
        folder.mkdir()
        (folder / "train.py").write_text(script())
    known = {"TRAINMOVER_SECRET": secret}
    with Terminal(tmp_path, filled(bus)) as server:
        server.wait_for("Server is ready")
        with (
            Terminal(tmp_path, filled(services)),
            Terminal(machines["a"], filled(machine), TRAINMOVER_MACHINE="a", **known) as one,
            Terminal(machines["b"], filled(machine), TRAINMOVER_MACHINE="b", **known) as other,
        ):
            for terminal in (one, other):
                assert f"completed: {NUM_STEPS} steps" in terminal.finish()


def test_the_three_ways_to_run_a_script(tmp_path: Path) -> None:
    (ways,) = run_by("test_the_three_ways_to_run_a_script")
    (tmp_path / "train.py").write_text(script())
    with Terminal(tmp_path, ways, OMP_NUM_THREADS="1", PYTHONHASHSEED="0") as terminal:
        said = terminal.finish()
    lines = [line for line in said.splitlines() if f"completed: {NUM_STEPS} steps" in line]
    states = [line.partition("state ")[2].split()[0] for line in lines]
    assert len(states) == 3, said[-6000:]
    assert states[1] == states[2] != states[0]  # two ranks, unprotected and protected; one rank
