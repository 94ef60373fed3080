"""A compiled model: each process notes how many graphs dynamo has compiled in it, step by step."""

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from driven import note, wait_for_pace
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import trainmover

WIDTH = 32


class Small(nn.Module):
    """Dynamo compiles this one's forward, and no module of torch by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.dropout, self.outer = nn.Dropout(0.2), nn.Linear(WIDTH, 1)

    def forward(self, x_BD: Tensor) -> Tensor:
        y_BD = self.norm(self.inner(x_BD)).relu()
        y_B1: Tensor = self.outer(self.dropout(y_BD))
        return y_B1.square().mean()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rebindable", action="store_true")
    parser.add_argument("--ddp-inside", action="store_true", help="torch.compile(DDP(model))")
    return parser.parse_args()


def num_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def train(ctx: trainmover.Context) -> None:
    args = parse()
    torch.manual_seed(7)
    bare = Small()
    if args.ddp_inside:
        ddp = DistributedDataParallel(bare, process_group=ctx.group("dp"))
        model = torch.compile(ddp)
    else:
        ddp = DistributedDataParallel(torch.compile(bare), process_group=ctx.group("dp"))
        model = ddp
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    inputs = torch.randn(640, WIDTH, generator=torch.Generator().manual_seed(3))
    dataset = TensorDataset(torch.arange(640), inputs)

    def loader() -> DataLoader[tuple[Tensor, ...]]:
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, ctx.size("dp"), ctx.coordinate("dp"), seed=3
        )
        return DataLoader(dataset, batch_size=4, sampler=sampler)

    def seed() -> None:
        torch.manual_seed(100 + ctx.rank)

    data = ctx.batches(loader)
    ctx.track(model=ddp, optimizer=optimizer)
    ctx.on_assigned(seed)
    for step in ctx.steps(args.steps):
        wait_for_pace(ctx, step, args.folder / "pace")
        with step:
            index, x = next(data)
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            ctx.after(step, partial(note, args.folder, ctx.rank, step.number, index.tolist()))
        with (args.folder / "graphs").open("a") as out:
            entry = {"pid": os.getpid(), "step": step.number, "shadow": step.shadow}
            out.write(json.dumps({**entry, "graphs": num_graphs()}) + "\n")


if __name__ == "__main__":
    trainmover.run(train, rebindable=parse().rebindable)
