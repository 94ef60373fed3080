"""200 MB of state in each rank, nearly all of it frozen so that steps are short, and readings of
the process's memory peak: over 20 plain steps, over those in which a peer is replaced, and over
those in which one moves."""

import argparse
import json
import os
from pathlib import Path

import torch
from driven import wait_for_pace
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import trainmover

FROZEN, TRAINED = 48_000_000, 800
PLAIN_FROM, PLAIN_TO, RECOVERED, MOVED = 5, 25, 30, 40


class Peak:
    """The peak of resident memory of this process, from one reading to the next."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mib: dict[int, float] = {}

    def read(self, step: int) -> None:
        """Between blocks, at the steps that count; a step that comes again is not read again."""
        if step not in (PLAIN_FROM, PLAIN_TO, RECOVERED, MOVED) or step in self._mib:
            return
        status = Path("/proc/self/status").read_text()
        self._mib[step] = int(status.split("VmHWM:")[1].split()[0]) / 1024
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what is resident now
        if PLAIN_FROM in self._mib:
            new = self._path.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps(self._mib))
            new.rename(self._path)


def train(ctx: trainmover.Context) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    torch.manual_seed(7)
    body = nn.Linear(TRAINED, TRAINED)
    frozen = nn.ParameterList([torch.full((FROZEN,), 0.5)]).requires_grad_(False)
    model = DistributedDataParallel(body, process_group=ctx.group("dp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    ctx.track(model=model, frozen=frozen, optimizer=optimizer)
    peak: Peak | None = None
    for step in ctx.steps(MOVED + 2):
        if not step.shadow:
            peak = peak or Peak(args.folder / f"peak{ctx.rank}.json")
            peak.read(step.number)
        wait_for_pace(ctx, step, args.folder / "pace")
        with step:
            loss = model(torch.ones(4, TRAINED)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    trainmover.run(train)
