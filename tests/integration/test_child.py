"""A forked worker ends as `python script` does: the same words in the same order, the same code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BECOME = """
import os, sys
from trainmover.agent.child import Pipes, become
from trainmover.agent.orders import Program
become(Program(script=sys.argv[1]), {}, Pipes(stdout=os.dup(1), stderr=os.dup(2)))
"""

ENDS = {
    "at the end of the script": "",
    "by exit code": "sys.exit(3)",
    "by an exit code above 255": "sys.exit(259)",
    "by a negative exit code": "sys.exit(-1)",
    "by exit without a code": "sys.exit()",
    "by an exit that says why": "sys.exit('why')",
    "by an exception": "raise ValueError('wrong')",
    "with a thread that goes on": "threading.Thread(target=late).start()",
    "with a thread that nobody waits for": "threading.Thread(target=late, daemon=True).start()",
    "with an exit function that fails": "atexit.register(lambda: 1 / 0)",
    "with its output closed": "sys.stdout.close()",
}

SCRIPT = """
import atexit, sys, threading

said = threading.Event()

def late():
    said.wait({wait_s})
    print("late")

@atexit.register
def bye():
    print("bye")
    sys.stderr.write("no newline, not flushed")

print("begun")
{end}
"""


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_forked_worker_ends_as_python_does(end: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(end=end, wait_s=30 if "daemon" in end else 0.05))
    plain, ours = (
        subprocess.run(
            [sys.executable, *how, str(script)],
            env={**os.environ, "PYTHONUNBUFFERED": ""},
            capture_output=True,
            text=True,
            timeout=20,
        )
        for how in ((), ("-c", BECOME))
    )
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    assert ours.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]
