"""A script to be rehearsed: sound, or with one of the mistakes that a rehearsal is to name."""

import argparse
import os
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import trainmover


def train(ctx: trainmover.Context) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chance", action="store_true", help="data that no seed decides")
    parser.add_argument("--counter", action="store_true", help="a plain variable in the loss")
    args = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(256, 4)
    if args.chance:
        x += os.urandom(1)[0] / 256
    dataset = TensorDataset(x, x.sum(dim=1, keepdim=True))
    body = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.Linear(16, 1))
    model = DistributedDataParallel(body, process_group=ctx.group("dp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, ctx.size("dp"), ctx.coordinate("dp")
    )
    data = ctx.batches(lambda: DataLoader(dataset, batch_size=8, sampler=sampler))
    ctx.track(model=model, optimizer=optimizer)
    seen = 0

    for step in ctx.steps(10_000, closing=True):
        with step:
            if step.closing:
                continue
            inputs, targets = next(data)
            seen += len(inputs)
            loss = nn.functional.mse_loss(model(inputs), targets)
            if args.counter:
                loss = loss / seen
            torch.autograd.backward(loss)
            step.report(loss=loss)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    trainmover.run(train)
