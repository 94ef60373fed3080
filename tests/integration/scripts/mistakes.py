"""A small job that makes the mistake it is told to make, or none.

`<folder>/blocked` keeps workers that start from coming up; `<folder>/pace` holds the steps.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import trainmover
from trainmover.runtime.step import Step

AT = 2  # the step in which mistakes inside the loop are made


class Lambda:
    """Looks trackable; its state is not."""

    def state_dict(self) -> dict[str, Any]:
        return {"schedule": [1, lambda x: x]}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--mistake", default="none")
    return parser.parse_args()


ARGS = parse()


def train(ctx: trainmover.Context) -> None:
    made = ARGS.mistake
    if made == "error in set-up" and not ctx.shadow and ctx.rank == 1:
        raise ValueError("rank 1 is not set up")
    if made == "unknown axis":
        ctx.group("tp")
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(4, 4), process_group=ctx.group("dp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    data = ctx.batches(DataLoader(TensorDataset(torch.arange(64.0).view(16, 4)), 2))
    if made == "unmovable":
        ctx.track(lambdas=Lambda())
    if made == "parameters of no module":
        ctx.track(other=other)
    ctx.track(model=model, optimizer=optimizer)
    for step in ctx.steps(ARGS.steps):
        wait_for_pace(step)
        now = step.number == AT and not step.shadow
        if now and outside(ctx, made, model, optimizer, data):
            break
        if made == "not entered":
            continue
        with step:
            if now:
                inside(ctx, made)
            loss = model(next(data)[0]).mean()
            loss.backward()
            (other if made == "untracked optimizer" else optimizer).step()
            optimizer.zero_grad()
            step.report(loss=loss)


def outside(
    ctx: trainmover.Context,
    made: str,
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    data: Any,
) -> bool:
    """Between two blocks; True: leave the loop."""
    match made:
        case "collective between blocks":
            dist.all_reduce(torch.ones(1))
        case "batch outside":
            next(data)
        case "update outside":
            optimizer.step()
        case "gradient left over":
            torch.autograd.backward(model.module(torch.ones(1, 4)).sum())
        case "steps twice":
            next(iter(ctx.steps(1)))
    return made == "break"


def inside(ctx: trainmover.Context, made: str) -> None:
    match made:
        case "error on one rank" if ctx.rank == 1:
            raise ValueError("rank 1 cannot")
        case "error on all ranks":
            raise ValueError("no rank can")
        case "exit on one rank" if ctx.rank == 1:
            sys.exit(3)
        case "all die":
            os.kill(os.getpid(), signal.SIGKILL)


def wait_for_pace(step: Step) -> None:
    pace = ARGS.folder / "pace"
    while not step.shadow and pace.exists() and step.number >= int(pace.read_text()):
        time.sleep(0.005)


if __name__ == "__main__":
    while (ARGS.folder / "blocked").exists():
        time.sleep(0.05)
    trainmover.run(train)
