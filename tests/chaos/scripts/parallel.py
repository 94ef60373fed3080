"""Any parallelism of parallelisms.py over the axes of the job; ledger and pace as in everything.py.

`--each NAME:AXES` trains several of them side by side in one job, each over a mesh of its own.
"""

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from driven import note, wait_for_pace
from parallelisms import BATCH, CLASSES, FEATURES, LENGTH, Part, build, data_place, local, mesh_of
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import trainmover

SAMPLES = 320


@dataclass(frozen=True)
class Trained:
    """One parallelism with what belongs to it."""

    name: str
    part: Part
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    data: Any


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--parallelism", default="ddp", help="over ctx.mesh")
    parser.add_argument("--each", nargs="*", default=[], metavar="NAME:AXES[:SHARDED,OVER]")
    return parser.parse_args()


def trained(ctx: trainmover.Context, name: str, mesh: DeviceMesh, over: tuple[str, ...]) -> Trained:
    place, size = data_place(mesh)
    generator = torch.Generator().manual_seed(7)
    points = torch.randn(SAMPLES, LENGTH, FEATURES, generator=generator)
    dataset = TensorDataset(torch.arange(SAMPLES), points, points.argmax(dim=2) % CLASSES)
    part = build(name, mesh)
    optimizer = torch.optim.AdamW(part.module.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)

    def loader() -> DataLoader[Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, size, place, seed=4)
        return DataLoader(dataset, BATCH, sampler=sampler, drop_last=True)

    data = ctx.batches(loader)
    key = name.replace("-", "_") if name[0].isalpha() else f"p{name}"
    objects: dict[str, Any] = {
        key: part.module,
        f"{key}_optimizer": optimizer,
        f"{key}_scheduler": scheduler,
    }
    ctx.track(sharded_over=over, **objects)
    return Trained(name, part, optimizer, scheduler, data)


def train(ctx: trainmover.Context) -> None:
    args = parse()
    everything = []
    for each in args.each:
        name, axes, over = (*each.split(":"), "")[:3]
        axes_over = tuple(over.split(",")) if over else ()
        everything.append(trained(ctx, name, mesh_of(axes), axes_over))
    if not everything:
        everything.append(trained(ctx, args.parallelism, ctx.mesh, ()))
    losses: dict[str, list[float]] = {t.name: [] for t in everything}
    torch.manual_seed(300 + ctx.rank)

    for step in ctx.steps(args.steps):
        wait_for_pace(ctx, step, args.folder / "pace")
        with step:
            used: list[int] = []
            for t in everything:
                index, x, y = next(t.data)
                used += index.tolist()
                loss = t.part.backward(x, y)
                if loss is not None:
                    step.report(**{t.name.replace("-", "_"): loss})
                    ctx.after(step, partial(losses[t.name].append, float(loss)))
            for t in everything:
                t.optimizer.step()
            for t in everything:
                t.scheduler.step()
                t.optimizer.zero_grad()
            if len(everything) == 1:
                ctx.after(step, partial(note, args.folder, ctx.rank, step.number, used))
    if args.each:
        result = {
            t.name: {
                "losses": losses[t.name],
                "parameters": [local(p.detach()).clone() for p in t.part.module.parameters()],
            }
            for t in everything
        }
        torch.save(result, args.folder / f"rank{ctx.rank}.pt")


if __name__ == "__main__":
    trainmover.run(train)
