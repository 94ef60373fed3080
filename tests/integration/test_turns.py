"""Standbys of one machine warm up one after the other."""

import subprocess
import sys
from pathlib import Path

from trainmover.runtime.warming import Turn

TAKE_AND_FORK = """
import os, sys
from pathlib import Path
from trainmover.runtime.warming import Turn
turn = Turn(Path(sys.argv[1]))
if turn.take() and os.fork() == 0:  # as a loader's worker is
    sys.stdin.readline()
    os._exit(0)
print("taken", flush=True)
sys.stdin.readline()
"""


def test_a_turn_is_one_workers_until_it_ends_whatever_it_has_forked(tmp_path: Path) -> None:
    ours = Turn(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", TAKE_AND_FORK, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout
        assert other.stdout.readline() == "taken\n"
        assert not ours.take()
        other.kill()
        other.wait(10)
        assert ours.take()  # its child lives on
