"""A job whose bits depend on ranks, seeds, data order and on when it stops.

Each rank writes what it saw of every committed step to `<folder>/rank<r>`, and its end.
"""

import argparse
import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import trainmover

STEPS, STOPS_AT = 40, 24


def train(ctx: trainmover.Context) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    lines: list[str] = []
    inputs = torch.arange(1024.0).view(256, 4) / 1024
    dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    body = nn.Sequential(
        nn.Linear(4, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 1)
    )
    model = DistributedDataParallel(body, process_group=ctx.group("dp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, ctx.size("dp"), ctx.coordinate("dp")
    )
    data = ctx.batches(lambda: DataLoader(dataset, batch_size=16, sampler=sampler))
    ctx.track(model=model, optimizer=optimizer, scheduler=scheduler)
    ctx.vars["noise"] = 0.0
    for step in ctx.steps(STEPS, closing=True):
        with step:
            if step.closing:
                continue
            x, y = next(data)
            loss = nn.functional.mse_loss(model(x + 0.01 * torch.randn_like(x)), y)
            torch.autograd.backward(loss)
            ctx.vars["noise"] += torch.rand(1).item()
            step.report(loss=loss)
            if ctx.rank == ctx.world_size - 1:
                step.report(noise=ctx.vars["noise"])  # of one rank only
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if step.number == STOPS_AT and ctx.rank == 0:
                step.stop()  # after the update: one step more follows
            seen = f"{step.number} {data.epoch} {float(loss).hex()} {ctx.vars['noise'].hex()}"
            ctx.after(step, partial(lines.append, seen))
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    folder: Path = parser.parse_args().folder
    (folder / f"rank{ctx.rank}").write_text("\n".join([*lines, digest.hexdigest()]))


if __name__ == "__main__":
    trainmover.run(train)
