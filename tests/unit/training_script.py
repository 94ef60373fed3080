"""A training script with everything that an undone block must put back, and its disturbances."""

from collections.abc import Callable

import torch
from tests.unit.one_rank import OneRank
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainmover.runtime.context import Context
from trainmover.runtime.step import Step

Do = Callable[[Step, "Script"], None]


def nothing(step: Step, script: "Script") -> None:
    pass


class Script:
    """What `train` has: a model with dropout and buffers, a scheduler, a shuffled loader."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.model = nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        items = TensorDataset(torch.arange(40.0).view(10, 4) / 40)
        self.data = ctx.batches(DataLoader(items, batch_size=4, shuffle=True))
        ctx.vars["seen"] = 0
        ctx.track(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)

    def backward(self) -> torch.Tensor:
        (batch,) = next(self.data)
        self.ctx.vars["seen"] += 1
        loss: torch.Tensor = self.model(batch).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    @property
    def digest(self) -> str:
        return self.ctx._run.tracked.state_digest()


def training(
    steps: int,
    *,
    closing: bool = False,
    before_vote: Do = nothing,
    after_vote: Do = nothing,
    after_block: Do = nothing,
) -> tuple[Callable[[Context], None], list[Step]]:
    """A `train`, and the list that the steps it was given go to, shadow steps left out."""
    given: list[Step] = []

    def train(ctx: Context) -> None:
        script = Script(ctx)
        for step in ctx.steps(steps, closing=closing):
            if not step.shadow:
                given.append(step)
            with step:
                if step.closing:
                    continue
                loss = script.backward()
                before_vote(step, script)
                script.update()
                step.report(loss=loss)
                after_vote(step, script)
            after_block(step, script)

    return train, given


def at(number: int, do: Do) -> Do:
    """`do`, at the first attempt of that step."""
    left = [number]

    def once(step: Step, script: Script) -> None:
        if not step.shadow and step.number in left:
            left.remove(step.number)
            do(step, script)

    return once


def breaking(one: OneRank) -> Do:
    return lambda step, script: one.break_links()


def recovering(one: OneRank) -> Do:
    """As the mover does after a relink, as soon as a block was undone."""

    def recover(step: Step, script: Script) -> None:
        if not step.shadow and not step.committed:
            one.recover()

    return recover
