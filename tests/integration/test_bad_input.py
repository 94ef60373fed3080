"""Bad input gets a sentence and an exit code: what was expected, what came, what to do."""

import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog
from tests.integration.command import Command, carriers, run

from trainmover.bus.server import EmbeddedServer, find_binary
from trainmover.cli.main import main

MISTAKES = str(Path(__file__).parent / "scripts" / "mistakes.py")
UNUSED = "nats://127.0.0.1:9"
"""The discard port: nothing listens there."""


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


# ---- before anything runs


@pytest.fixture
def log_settings() -> Iterator[None]:
    """The command sets where logs go; other tests of this process have their own wishes."""
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("log_settings")
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--layout", "dp"], 2, "a layout is axis=size,axis=size"),
        (["--layout", "DP=2"], 2, "names in lower case"),
        (["--layout", "dp=3"], 2, "--layout dp=3 has 3 ranks, but --nnodes 1 x --nproc-per-node 2"),
        (["--layout", "dp=2,dp=1"], 2, "each axis stands once"),
        (["--bus", UNUSED], 2, "--bus needs --job NAME"),
        (["--bus", "foo://x"], 2, "expected nats://HOST:PORT, got 'foo://x'"),
        (["--bus", "nats://x:99999"], 2, "expected nats://HOST:PORT"),
        (["--port-range", "9-8"], 2, "expected FIRST-LAST"),
        (["--max-restarts", "3"], 2, "a standby takes over"),
        (["-m", "no.module"], 2, "no module 'no.module'"),
        (["no.py"], 2, "no script 'no.py'"),
    ],
)
def test_wrong_usage_is_refused_with_what_was_expected(
    arguments: list[str], code: int, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        found = main(["run", "--nproc-per-node", "2", *arguments, "script.py"])
    except SystemExit as error:
        found = int(str(error.code))
    said = capfd.readouterr().err
    assert (found, words in said) == (code, True), said
    assert "Traceback" not in said


@pytest.mark.usefixtures("log_settings")
def test_a_script_that_does_not_parse_is_shown_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--nproc-per-node", "2", script(tmp_path, "def f(:\n")]) == 1
    said = capfd.readouterr().err
    assert said.count("SyntaxError") == 1
    assert 'script.py", line 1' in said


@pytest.mark.full
def test_a_bus_that_nobody_answers_at_is_named_soon(tmp_path: Path) -> None:
    outcome = run(tmp_path, "--bus", UNUSED, script(tmp_path, ""))
    assert outcome.code == 6
    assert f"no NATS server answered at {UNUSED}" in outcome.output
    assert outcome.seconds < 15


@pytest.mark.full
def test_a_bus_without_jetstream_is_named_with_how_to_start_it(tmp_path: Path) -> None:
    with server_without_jetstream(tmp_path) as url:
        outcome = run(tmp_path, "--bus", url, script(tmp_path, ""))
    assert outcome.code == 6
    assert "start it with `nats-server -js`" in outcome.output


@contextmanager
def server_without_jetstream(folder: Path) -> Iterator[str]:
    flags = ("--addr", "127.0.0.1", "--port", "-1", "--ports_file_dir", str(folder))
    with subprocess.Popen([find_binary(), *flags], stderr=subprocess.DEVNULL) as process:
        ports = folder / f"nats-server_{process.pid}.ports"
        deadline = time.monotonic() + 10
        while not ports.exists() or not ports.read_text():
            assert time.monotonic() < deadline, "nats-server does not start"
            time.sleep(0.02)
        yield str(json.loads(ports.read_text())["nats"][0])
        process.terminate()


# ---- scripts that are no training scripts


def test_a_script_that_never_calls_run_fails_the_job(tmp_path: Path) -> None:
    outcome = run(tmp_path, "--machine=m", "--nproc-per-node=2", script(tmp_path, "print(1)\n"))
    assert outcome.code == 1
    assert "workers ended before they registered (m-w" in outcome.output
    assert "lacks the call `trainmover.run(train)`" in outcome.output


def test_an_error_before_run_is_shown_in_full_once(tmp_path: Path) -> None:
    text = "def f():\n    raise ValueError('at import')\nf()\n"
    outcome = run(tmp_path, "--nproc-per-node", "2", script(tmp_path, text))
    assert outcome.code == 1
    assert outcome.said("Traceback (most recent call last)") == 1
    assert outcome.said("ValueError: at import (its traceback stands above)") >= 1
    assert "runpy" not in outcome.output


# ---- names and ends


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[str]:
    server = EmbeddedServer(tmp_path / "bus")
    await server.start()
    yield server.url
    await server.stop()


SLEEPS = """\
import subprocess, time
child = subprocess.Popen(["sleep", "120"])
print("it sleeps")
time.sleep(120)
"""


async def test_a_live_job_of_the_same_name_is_named_with_its_host_and_start(
    tmp_path: Path, bus: str
) -> None:
    path = script(tmp_path, SLEEPS)
    with Command(tmp_path, "--bus", bus, "--machine=m1", path) as first:
        first.wait_for("it sleeps")
        twin = run(tmp_path, "--bus", bus, "--machine=m1", path, job=first.job)
        other = run(tmp_path, "--bus", bus, path, "an argument", job=first.job)
        stranger = run(tmp_path, "--bus", bus, path, job=first.job, TRAINMOVER_SECRET="aa")
        first.process.terminate()
        assert first.finish().code == 143
    assert (twin.code, other.code, stranger.code) == (2, 2, 2)
    assert "its machine m1 has an agent already" in twin.output
    assert "runs another script, arguments or layout" in other.output
    for outcome in (twin, other):
        assert f"submitted from {os.uname().nodename} at 2" in outcome.output
    assert "not signed with this secret" in stranger.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_run_and_all_its_processes(
    tmp_path: Path, number: signal.Signals
) -> None:
    with Command(tmp_path, script(tmp_path, SLEEPS)) as command:
        command.wait_for("it sleeps")
        command.process.send_signal(number)
        outcome = command.finish(20)
    assert outcome.code == 128 + number
    assert "Traceback" not in outcome.output
    assert not list((tmp_path / "trainmover").glob("*.json")), "the session file stays"


def test_a_killed_run_leaves_no_process(tmp_path: Path) -> None:
    with Command(tmp_path, script(tmp_path, SLEEPS)) as command:
        command.wait_for("it sleeps")
        assert any("sleep 120" in line for line in carriers(command.job).values())
        command.process.kill()
        assert command.finish().code == -signal.SIGKILL


# ---- mistakes in a training script

ALWAYS = [
    ("error on one rank", "rank 1 raised ValueError in step 2, again on a fresh worker: rank 1"),
]
FULL = [
    ("unmovable", "lambdas['schedule'][1] is a builtins.function, which cannot move with a rank"),
    ("unknown axis", "layout dp=2 has no axis 'tp'"),
    ("error in set-up", "rank 1 raised ValueError in step 0, before the first committed step"),
    ("error on all ranks", "raised ValueError in step 2, like 2 of 2 ranks"),
    ("exit on one rank", "rank 1 raised SystemExit in step 2, again on a fresh worker: 3"),
    ("parameters of no module", "2 parameters of tracked optimizers are in no tracked module"),
    ("untracked optimizer", "SGD is stepped in a block but not tracked; add it"),
    ("collective between blocks", "Move it into the block, before optimizer.step()"),
    ("batch outside", "move next(data) into the block"),
    ("update outside", "an optimizer was stepped outside `with step:`"),
    ("gradient left over", "accumulate gradients inside the block"),
    ("not entered", "each step of ctx.steps is entered"),
    ("steps twice", "ctx.steps may be used once"),
    ("break", "call step.stop() to end early"),
]


@pytest.mark.concurrent
@pytest.mark.parametrize(
    ("mistake", "words"),
    [*ALWAYS, *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)],
)
def test_a_mistake_in_the_script_ends_the_job_with_one_traceback(
    tmp_path: Path, mistake: str, words: str
) -> None:
    arguments = (MISTAKES, "--folder", str(tmp_path), "--mistake", mistake)
    outcome = run(tmp_path, "--nproc-per-node", "2", *arguments)
    assert outcome.code == 1, outcome.output
    assert words in outcome.output
    assert outcome.said("Traceback (most recent call last)") == 1, outcome.output


@pytest.mark.concurrent
@pytest.mark.full
def test_the_death_of_all_ranks_at_once_ends_the_job_with_4(tmp_path: Path) -> None:
    arguments = (MISTAKES, "--folder", str(tmp_path), "--mistake", "all die")
    outcome = run(tmp_path, "--nproc-per-node", "2", *arguments)
    assert outcome.code == 4, outcome.output
    assert "ranks 0, 1 held every copy of the state (whole model" in outcome.output


@pytest.mark.full
def test_workers_that_find_no_free_port_say_so(tmp_path: Path) -> None:
    arguments = (MISTAKES, "--folder", str(tmp_path))
    outcome = run(tmp_path, "--nproc-per-node", "2", "--port-range", "31999-31999", *arguments)
    assert outcome.code == 1, outcome.output
    assert "expected a free port in 31999-31999 on 127.0.0.1" in outcome.output
