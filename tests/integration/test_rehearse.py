"""`trainmover rehearse` on real jobs: a sound script, and two whose mistakes it is to name."""

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.integration.command import TRAINMOVER, carriers

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests/integration/scripts/rehearsed.py"
STEPS, SEED = 12, 3

pytestmark = [pytest.mark.concurrent, pytest.mark.timeout(400)]


@dataclass(frozen=True)
class Rehearsed:
    code: int
    output: str
    findings: dict[str, Any]


def rehearse(folder: Path, *arguments: str) -> Rehearsed:
    return command(folder, f"--steps={STEPS}", f"--seed={SEED}", str(SCRIPT), *arguments)


def command(folder: Path, *arguments: str) -> Rehearsed:
    ended = subprocess.run(
        [*TRAINMOVER, "rehearse", "--json=findings.json", *arguments],
        cwd=folder,
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=360,
    )
    path = folder / "findings.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    return Rehearsed(ended.returncode, ended.stdout, found)


def test_a_plain_variable_in_the_loss_is_named_as_untracked_state(tmp_path: Path) -> None:
    """In the run with kills the joiner has counted from its own set-up on."""
    ran = rehearse(tmp_path, "--counter")
    assert ran.code == 1, ran.output
    assert ran.findings["verdict"] == "untracked state"
    undisturbed, disturbed = ran.findings["comparisons"]
    assert undisturbed["difference"] is None
    first = disturbed["difference"]
    killed_in = [int(kill.partition("step=")[2].split(",")[0]) for kill in ran.findings["kills"]]
    assert first["step"] in range(killed_in[0], killed_in[0] + 2)
    assert first["objects"][-1] == "model"
    assert f"differs for the first time after step {first['step']}" in ran.output
    assert "Put it into ctx.vars" in ran.output


@pytest.mark.full
def test_a_sound_script_is_the_same_with_kills(tmp_path: Path) -> None:
    ran = rehearse(tmp_path)
    assert ran.code == 0, ran.output
    assert ran.findings["verdict"] == "same"
    assert [run["completed_steps"] for run in ran.findings["runs"]] == [STEPS] * 3
    assert len({run["state_digest"] for run in ran.findings["runs"]}) == 1
    assert [run["exit_code"] for run in ran.findings["runs"]] == [0] * 3
    assert (len(ran.findings["kills"]), ran.findings["not_reached"]) == (2, [])
    assert ran.output.count("incident g") == 2
    assert ran.output.count(" downtime ") == 2
    assert "SAME: 2 kills left no trace" in ran.output


@pytest.mark.full
def test_make_demo_shows_a_recovery_that_left_no_trace(tmp_path: Path) -> None:
    (line,) = re.findall(r"trainmover rehearse (.*)", (ROOT / "Makefile").read_text())
    *flags, script = line.split()
    ran = command(tmp_path, *flags, str(ROOT / script))
    assert ran.code == 0, ran.output
    assert ran.output.count("incident g") == 1
    assert "SAME: 1 kill left no trace" in ran.output


@pytest.mark.full
def test_a_rehearsal_that_is_interrupted_ends_its_job_and_judges_nothing(tmp_path: Path) -> None:
    started = [*TRAINMOVER, "rehearse", "--steps=1000", "--json=findings.json", str(SCRIPT)]
    with subprocess.Popen(
        started,
        cwd=tmp_path,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        deadline = time.monotonic() + 60
        while not (sessions := list((tmp_path / "trainmover").glob("*.json"))):
            assert time.monotonic() < deadline, "no job was started"
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert len(output.splitlines()) == 1, output
    assert not (tmp_path / "findings.json").exists()
    assert not carriers(sessions[0].stem)


@pytest.mark.full
def test_a_script_that_chance_decides_is_named_as_not_deterministic(tmp_path: Path) -> None:
    ran = rehearse(tmp_path, "--chance")
    assert ran.code == 1, ran.output
    assert (ran.findings["verdict"], ran.findings["kills"]) == ("not deterministic", [])
    (comparison,) = ran.findings["comparisons"]
    assert comparison["difference"]["step"] == 0
    assert "os.urandom" in ran.output


@pytest.mark.full
def test_a_script_that_fails_ends_the_rehearsal_with_its_traceback(tmp_path: Path) -> None:
    ran = rehearse(tmp_path, "--no-such-flag")
    assert ran.code == 1, ran.output
    assert ran.findings["verdict"] == "failed"
    assert "unrecognized arguments: --no-such-flag" in ran.output
    assert "FAILED: run 1, undisturbed, ended with exit code" in ran.output
