"""Two stages by plain send and recv, two micro-batches, gradients averaged over `dp` by hand.

For `--layout pp=2,dp=N`. Dropout, a schedule, and a shuffled loader that both stages of a pipeline
draw from: one takes its inputs, the other its classes. Ledger and pace as in everything.py.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from driven import note, wait_for_pace
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import trainmover

SAMPLES, FEATURES, CLASSES = 480, 12, 4
MICRO_BATCHES = 2
FIRST, LAST = 0, 1  # places in the group of a pipeline


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=6, help="samples of a micro-batch")
    parser.add_argument("--width", type=int, default=32, help="of what the stages send")
    return parser.parse_args()


def train(ctx: trainmover.Context) -> None:
    args = parse()
    pipeline, replicas = ctx.group("pp"), ctx.group("dp")
    first = ctx.coordinate("pp") == FIRST
    torch.manual_seed(21)
    points = torch.randn(SAMPLES, FEATURES)
    dataset = TensorDataset(torch.arange(SAMPLES), points, points.argmax(dim=1) % CLASSES)
    stages = (
        nn.Sequential(nn.Linear(FEATURES, args.width), nn.ReLU(), nn.Dropout(0.2)),
        nn.Sequential(
            nn.Linear(args.width, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, CLASSES)
        ),
    )
    stage = stages[FIRST if first else LAST]
    optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, ctx.size("dp"), ctx.coordinate("dp"), seed=4
    )
    data = ctx.batches(lambda: DataLoader(dataset, args.batch, sampler=sampler, drop_last=True))
    ctx.track(stage=stage, optimizer=optimizer, scheduler=scheduler)
    torch.manual_seed(300 + ctx.rank)

    for step in ctx.steps(args.steps):
        wait_for_pace(ctx, step, args.folder / "pace")
        with step:
            batches = [next(data) for _ in range(MICRO_BATCHES)]
            if first:
                forward_and_backward(stage, [x for _, x, _ in batches], pipeline)
            else:
                size = (args.batch, args.width)
                step.report(loss=to_the_loss(stage, size, [y for _, _, y in batches], pipeline))
            average_gradients(stage, replicas)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            used = torch.cat([index for index, _, _ in batches]).tolist()
            ctx.after(step, partial(note, args.folder, ctx.rank, step.number, used))


def forward_and_backward(
    stage: nn.Module, inputs: list[Tensor], pipeline: dist.ProcessGroup
) -> None:
    """The first stage: all activations go out before the first gradient comes back."""
    outputs = [stage(x) for x in inputs]
    sends = [dist.isend(y.detach(), group=pipeline, group_dst=LAST) for y in outputs]
    for output, sent in zip(outputs, sends, strict=True):
        gradient = torch.empty_like(output)
        dist.recv(gradient, group=pipeline, group_src=LAST)
        torch.autograd.backward(output, gradient)
        assert sent is not None
        sent.wait()


def to_the_loss(
    stage: nn.Module, size: tuple[int, int], targets: list[Tensor], pipeline: dist.ProcessGroup
) -> Tensor:
    """The last stage: each micro-batch forward and backward; the mean loss."""
    losses = []
    for target in targets:
        x = torch.empty(size)
        dist.recv(x, group=pipeline, group_src=FIRST)
        x.requires_grad_()
        loss = nn.functional.cross_entropy(stage(x), target) / MICRO_BATCHES
        torch.autograd.backward(loss)
        assert x.grad is not None
        dist.send(x.grad, group=pipeline, group_dst=FIRST)
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def average_gradients(stage: nn.Module, replicas: dist.ProcessGroup) -> None:
    gradients = [p.grad for p in stage.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat, group=replicas)
    flat /= replicas.size()
    means = torch.split(flat, [g.numel() for g in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))


if __name__ == "__main__":
    trainmover.run(train)
