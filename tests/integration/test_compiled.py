"""torch.compile over our groups, without a job: what is compiled, and that it is compiled once."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import trainmover

WIDTH = 8
Wrap = Callable[[nn.Module], nn.Module]


@pytest.fixture(autouse=True)
def _dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x_BD: Tensor) -> Tensor:
        y_B1: Tensor = self.outer(self.inner(x_BD).relu())
        return y_B1.square().mean()


def as_is(model: nn.Module) -> nn.Module:
    return model


def compiled(model: nn.Module) -> nn.Module:
    wrapped: nn.Module = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    return wrapped


def train(ctx: trainmover.Context, inside: Wrap, outside: Wrap) -> None:
    torch.manual_seed(1)
    ddp = DistributedDataParallel(inside(Small()), process_group=ctx.group("dp"))
    model = outside(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ctx.track(model=ddp, optimizer=optimizer)
    for step in ctx.steps(4):
        with step:
            model(torch.randn(4, WIDTH)).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("inside", "outside"), [(compiled, as_is), (as_is, compiled)], ids=["ddp-outside", "ddp-inside"]
)
def test_a_compiled_model_trains_with_ddp_and_compiles_nothing_when_train_runs_again(
    inside: Wrap, outside: Wrap
) -> None:
    trainmover.run(partial(train, inside=inside, outside=outside))
    graphs, frames = counters["stats"]["unique_graphs"], counters["frames"]["total"]
    trainmover.run(partial(train, inside=inside, outside=outside))
    assert graphs > 0
    assert (counters["stats"]["unique_graphs"], counters["frames"]["total"]) == (graphs, frames)
