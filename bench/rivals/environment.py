"""The rivals' own virtual environment: they are no dependencies of TrainMover."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

TORCHFT = "0.2.0"
INSTALL_S = 900.0


def rivals_python(cache: Path) -> Path:
    """Its interpreter, with torchft and the torch of this process; made at the first call."""
    torch = metadata.version("torch").partition("+")[0]
    venv = cache / f"torchft-{TORCHFT}-torch-{torch}"
    python, stamp = venv / "bin/python", venv / ".installed"
    if not stamp.exists():
        print(f"bench: installing torchft {TORCHFT} and torch {torch} into {venv}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True, timeout=INSTALL_S)
        packages = [f"torchft=={TORCHFT}", f"torch=={torch}", "numpy"]
        command = [python, "-m", "pip", "install", "-qq", *packages]
        subprocess.run(command, check=True, timeout=INSTALL_S)
        stamp.touch()
    return python


def variables() -> dict[str, str]:
    """One thread a rank for all systems, as `trainmover run` has it."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
