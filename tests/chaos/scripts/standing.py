"""Data parallel by hand; what a standby meets before it is warm is chosen by `--standby`."""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from driven import wait_for_pace
from torch import nn

import trainmover
from trainmover.runtime import warming


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--standby", choices=("fits", "differs", "raises", "hangs"), default="fits")
    return parser.parse_args()


def meet(what: str) -> None:
    """Only on a standby: nobody recorded this."""
    match what:
        case "differs":
            dist.all_reduce(torch.zeros(3, dtype=torch.int64))
        case "raises":
            raise RuntimeError("a standby cannot do this")
        case "hangs":
            time.sleep(600)


def train(ctx: trainmover.Context) -> None:
    args = parse()
    if ctx.shadow:
        meet(args.standby)
    torch.manual_seed(3)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ctx.track(model=model, optimizer=optimizer)
    for step in ctx.steps(args.steps):
        wait_for_pace(ctx, step, args.folder / "pace")
        with step:
            torch.manual_seed(1000 * step.number + ctx.rank)
            loss = model(torch.randn(8, 6)).square().mean()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            step.report(loss=loss)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    warming.WARM_S = 1.0 if parse().standby == "hangs" else warming.WARM_S
    trainmover.run(train, role_class=lambda rank, layout: "even" if rank % 2 == 0 else "odd")
