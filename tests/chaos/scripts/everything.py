"""What can go wrong all at once: BatchNorm, dropout, AdamW, a schedule, a GradScaler, a shuffled
loader (optionally with workers and random augmentation), four micro-batches, a late closing save.

Each committed step appends the samples it used to `<folder>/ledger/rank<r>.jsonl`. Before a step
each rank waits until `<folder>/pace` allows it, so that a test can say when faults come.
"""

import argparse
import os
import random
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from driven import note, wait_for_pace, wait_in_set_up
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import trainmover

SAMPLES, WIDTH = 640, 24


class Noisy(Dataset[tuple[int, Tensor, Tensor]]):
    """A sample is (its index, float32 [WIDTH], class); augmented from python's and torch's RNG."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        x = x + 0.1 * torch.randn(WIDTH) + 0.01 * random.random()
        return index, x, torch.tensor(index % 4)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--stop-at", type=int, help="rank 0 stops the loop in this step")
    parser.add_argument("--rebindable", action="store_true")
    parser.add_argument("--frozen-mb", type=int, default=0, help="state that no step changes")
    parser.add_argument("--die-in-set-up", action="store_true", help="rank 1 does, once")
    return parser.parse_args()


def train(ctx: trainmover.Context) -> None:
    args = parse()
    if args.die_in_set_up and ctx.rank == 1 and not ctx.shadow:
        die_once(args.folder / "died")
    wait_in_set_up(ctx, args.folder / "hold")
    torch.manual_seed(5)
    body = nn.Sequential(
        nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4)
    )
    model = DistributedDataParallel(body, process_group=ctx.group("dp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)

    def loader() -> DataLoader[Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(
            Noisy(), ctx.size("dp"), ctx.coordinate("dp"), seed=3
        )
        return DataLoader(Noisy(), batch_size=5, sampler=sampler, num_workers=args.loader_workers)

    def seed() -> None:
        torch.manual_seed(100 + ctx.rank)
        random.seed(200 + ctx.rank)

    data = ctx.batches(loader)
    ctx.track(model=model, optimizer=optimizer, scaler=scaler, scheduler=scheduler)
    if args.frozen_mb:
        frozen = [torch.full((250_000,), float(i + ctx.shadow)) for i in range(args.frozen_mb)]
        ctx.track(frozen=nn.ParameterList(frozen).requires_grad_(False))
    ctx.on_assigned(seed)

    for step in ctx.steps(args.steps, closing=True):
        wait_for_pace(ctx, step, args.folder / "pace")
        with step:
            if step.closing:
                continue
            if step.number == args.stop_at and ctx.rank == 0:
                step.stop()
            used: list[int] = []
            for micro in range(args.micro_batches):
                index, x, y = next(data)
                used += index.tolist()
                if micro < args.micro_batches - 1:
                    with model.no_sync():
                        torch.autograd.backward(scaler.scale(loss_of(model, x, y)))
                else:
                    loss = loss_of(model, x, y)
                    torch.autograd.backward(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            step.report(loss=loss, tokens=5 * args.micro_batches)
            ctx.after(step, partial(note, args.folder, ctx.rank, step.number, used))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def die_once(marker: Path) -> None:
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    trainmover.run(train, rebindable="--rebindable" in sys.argv)
