"""A pipeline of four stages under `trainmover run`: three role classes, two stages of one of them.

The stages ask each other for the shapes of what they send, so that a standby needs tapes.
"""

import argparse

import torch
import training
from ledger import COMMIT, RANKS, Ledger
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from vocabulary import vocabulary

import trainmover
from trainmover.schemas.layout import Layout

BATCH, MICRO_BATCHES = 32, 4


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ledger", required=True)
    parser.add_argument(
        "--expensive", action="count", default=0, help="a set-up that takes longer; or more"
    )
    parser.add_argument(
        "--halves", action="store_true", help="rank 1 records in the place of rank 2"
    )
    return parser.parse_args()


def halves(rank: int, layout: Layout) -> str:
    """For a job without standbys: stages of one half do different things."""
    return "front" if rank < RANKS // 2 else "back"


def stage_of(index: int) -> nn.Module:
    torch.manual_seed(index)
    width = training.WIDTH
    body = [nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*body, *([nn.Linear(width, 1)] if index == RANKS - 1 else []))


def train(ctx: trainmover.Context) -> None:
    args = parse()
    ledger = Ledger(args.ledger)
    for _ in range(args.expensive):
        vocabulary()
    index = ctx.coordinate("pp")
    model = stage_of(index)
    stage = PipelineStage(model, index, RANKS, torch.device("cpu"), group=ctx.group("pp"))
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = training.optimizer(model)
    samples = training.dataset()
    data = ctx.batches(lambda: torch.utils.data.DataLoader(samples, BATCH, drop_last=True))
    ctx.track(model=model, optimizer=optimizer)
    for step in ctx.steps(training.ENDLESS):
        with step:
            x, y = next(data)
            schedule.step(*[x] * stage.is_first, target=y if stage.is_last else None)
            optimizer.step()
            optimizer.zero_grad()
        if step.committed and not step.shadow:
            ledger.write(COMMIT, ctx.rank, step.number, RANKS)


if __name__ == "__main__":
    trainmover.run(train, role_class=halves if parse().halves else None)
