"""Not rebindable: shards its data by rank before the first step, with plain torch calls only."""

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from driven import note, wait_for_pace
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import trainmover


def train(ctx: trainmover.Context) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--hidden-schedule", action="store_true", help="that nothing tracks")
    parser.add_argument("--mean-after-update", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(7)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    everything = torch.arange(320).reshape(40, 8).float() / 320
    mine = everything[dist.get_rank() :: dist.get_world_size()]
    data = ctx.batches(DataLoader(TensorDataset(torch.arange(len(mine)), mine), 2, shuffle=True))
    ctx.track(model=model, optimizer=optimizer)
    torch.manual_seed(70 + dist.get_rank())
    updates = 0
    for step in ctx.steps(args.steps):
        wait_for_pace(ctx, step, args.folder / "pace")
        with step:
            index, x = next(data)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if args.hidden_schedule:
                updates += 1
                optimizer.param_groups[0]["lr"] = 0.05 / updates
            if args.mean_after_update:
                mean = loss.detach().clone()
                dist.all_reduce(mean)  # a rank that is cut off here is dirty (TAIL)
                ctx.vars["mean"] = float(mean)
            ctx.after(step, partial(note, args.folder, ctx.rank, step.number, index.tolist()))


if __name__ == "__main__":
    trainmover.run(train)
