"""Not rebindable: shards its data by rank before the first step, with plain torch calls only."""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import trainmover

STEPS = 8


def train(ctx: trainmover.Context) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ledger", default="")
    args = parser.parse_args()
    torch.manual_seed(7)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    everything = torch.arange(320).reshape(40, 8).float() / 320
    mine = everything[dist.get_rank() :: dist.get_world_size()]
    data = ctx.batches(DataLoader(TensorDataset(torch.arange(len(mine)), mine), 2, shuffle=True))
    ctx.track(model=model, optimizer=optimizer)
    torch.manual_seed(70 + dist.get_rank())
    for step in ctx.steps(STEPS):
        with step:
            index, x = next(data)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)  # after the optimizer: a rank cut off here is dirty (TAIL)
            ctx.vars["mean"] = float(mean)
            ctx.after(step, lambda n=step.number, s=index.tolist(): note(args.ledger, ctx.rank, n, s))


def note(ledger: str, rank: int, step: int, samples: list[int]) -> None:
    if ledger:
        with (Path(ledger) / f"rank{rank}.jsonl").open("a") as out:
            out.write(json.dumps({"step": step, "samples": samples}) + "\n")


if __name__ == "__main__":
    trainmover.run(train)
