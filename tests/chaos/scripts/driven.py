"""By what a test drives a script, and what it reads of it: the pace of steps, a ledger of data."""

import json
import time
from pathlib import Path

import trainmover
from trainmover.runtime.step import Step


def wait_for_pace(ctx: trainmover.Context, step: Step, pace: Path) -> None:
    """Until the file allows this step; without the file at once."""
    while not step.shadow and pace.exists():
        if step.number < int(pace.read_text()):
            return
        time.sleep(0.005)


def wait_in_set_up(ctx: trainmover.Context, hold: Path) -> None:
    """A joiner's set-up lasts as long as the file is there."""
    while not ctx.shadow and hold.exists():
        time.sleep(0.005)


def note(folder: Path, rank: int, step: int, samples: list[int]) -> None:
    """The samples of a committed step, by their numbers."""
    with (folder / "ledger" / f"rank{rank}.jsonl").open("a") as out:
        out.write(json.dumps({"step": step, "samples": samples}) + "\n")
