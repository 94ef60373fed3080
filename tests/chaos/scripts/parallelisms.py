"""One small model under every parallelism of torch, each by torch's own words alone.

`build` gives a `Part`: what this rank holds, and how it runs one update's forward and backward.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

LENGTH, FEATURES, WIDTH, CLASSES = 8, 12, 16, 4
BLOCKS = 2
BATCH = 8
"""Samples of an update on each rank of the data axes."""
MICRO_BATCHES = 2
STAGE_MICRO_BATCHES = 4
"""No fewer than stages."""
DATA_AXES = ("dp", "dp_replicate", "dp_shard")

Backward = Callable[[Tensor, Tensor], Tensor | None]
"""(float32 [BATCH, LENGTH, FEATURES], int64 [BATCH, LENGTH]) -> the mean loss where it is known;
then every gradient is there, averaged over the data axes."""


@dataclass(frozen=True)
class Part:
    """`module` is what this rank holds, `shard` its key: ranks of one key hold equal parameters."""

    module: nn.Module
    backward: Backward


class Block(nn.Module):
    """Residual, with a norm that sequence parallelism can shard."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))
        return out


class Head(nn.Module):
    """Log-probabilities, so that no view leaves the model: fully_shard warns of those."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.log_softmax(self.linear(x), dim=-1)


class Net(nn.Sequential):
    """[batch, LENGTH, FEATURES] -> [batch, LENGTH, CLASSES]; the same weights on every rank."""

    def __init__(self, dropout: float = 0.2) -> None:
        torch.manual_seed(11)
        super().__init__(
            nn.Linear(FEATURES, WIDTH),
            *(Block(dropout) for _ in range(BLOCKS)),
            Head(),
        )


class Gated(nn.Module):
    """A second head that only some micro-batches use: unused parameters for DDP to find."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.other = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out + self.other(x) if x[0, 0, 0] > 0 else out


def mesh_of(axes: str) -> DeviceMesh:
    """`dp=2,tp=2` -> a mesh with these names. Collective."""
    pairs = [axis.partition("=") for axis in axes.split(",")]
    sizes = tuple(int(size) for _, _, size in pairs)
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple(name for name, _, _ in pairs))


def data_place(mesh: DeviceMesh) -> tuple[int, int]:
    """Which of how many different batches this rank takes."""
    names = mesh.mesh_dim_names or ()
    place = 0
    for name in names:
        if name in DATA_AXES:
            place = place * mesh[name].size() + mesh.get_local_rank(name)
    return place, prod(mesh[name].size() for name in names if name in DATA_AXES)


def build(name: str, mesh: DeviceMesh) -> Part:
    """Set-up of one parallelism over all axes of `mesh`. Collective."""
    match name:
        case "ddp":
            return replicated(Net(), mesh["dp"].get_group())
        case "ddp-static":
            return replicated(Net(), mesh["dp"].get_group(), static_graph=True)
        case "ddp-unused":
            return replicated(Gated(), mesh["dp"].get_group(), find_unused_parameters=True)
        case "fsdp" | "hsdp":
            return sharded(Net(), mesh)
        case "tp" | "sp":
            return split_tensors(Net(dropout=0), mesh, sequence=name == "sp")
        case "gpipe" | "gpipe-unshaped":
            return staged(Net(), mesh, ScheduleGPipe, shaped=name == "gpipe")
        case "1f1b":
            return staged(Net(), mesh, Schedule1F1B, shaped=True)
    raise ValueError(f"no parallelism {name!r}")


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def accumulated(
    module: nn.Module, hold_back: Callable[[bool], AbstractContextManager[object]]
) -> Backward:
    """Micro-batches one after the other; `hold_back(True)` keeps the gradients of all but the last
    on this rank."""

    def backward(x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(())
        pieces = list(zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True))
        for count, (inputs, targets) in enumerate(pieces, 1):
            with hold_back(count < MICRO_BATCHES):
                loss = loss_of(module(inputs), targets) / MICRO_BATCHES
                torch.autograd.backward(loss)
            total += loss.detach()
        return total

    return backward


def replicated(net: nn.Module, group: dist.ProcessGroup, **options: Any) -> Part:
    ddp = DistributedDataParallel(net, process_group=group, bucket_cap_mb=0.004, **options)

    def hold_back(held: bool) -> AbstractContextManager[object]:
        return ddp.no_sync() if held and not options.get("static_graph") else nullcontext()

    return Part(ddp, accumulated(ddp, hold_back))


def sharded(net: Net, mesh: DeviceMesh) -> Part:
    for layer in list(net)[1:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    root = cast(FSDPModule, net)

    def hold_back(held: bool) -> AbstractContextManager[object]:
        root.set_requires_gradient_sync(not held)
        return nullcontext()

    return Part(net, accumulated(net, hold_back))


def split_tensors(net: Net, mesh: DeviceMesh, *, sequence: bool) -> Part:
    """Columns and rows over `tp`; with `sequence` what lies between them is split along LENGTH."""
    plan: dict[str, ParallelStyle] = {}
    last = f"{BLOCKS + 1}.linear"
    if sequence:
        plan["0"] = ColwiseParallel(output_layouts=Shard(1), use_local_output=False)
        for block in range(1, BLOCKS + 1):
            plan[f"{block}.norm"] = SequenceParallel(use_local_output=True)
            plan[f"{block}.up"] = ColwiseParallel(input_layouts=Shard(1))
            plan[f"{block}.down"] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        plan[last] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    else:
        plan["0"] = ColwiseParallel(output_layouts=Replicate())
        for block in range(1, BLOCKS + 1):
            plan[f"{block}.up"] = ColwiseParallel()
            plan[f"{block}.down"] = RowwiseParallel()
        plan[last] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(net, mesh["tp"], plan)
    replicas = mesh["dp"].get_group() if "dp" in (mesh.mesh_dim_names or ()) else None
    whole = accumulated(net, lambda _: nullcontext())

    def backward(x: Tensor, y: Tensor) -> Tensor | None:
        loss = whole(x, y)
        average_gradients(net, replicas)
        return loss

    return Part(net, backward)


def staged(net: Net, mesh: DeviceMesh, schedule_of: Any, *, shaped: bool) -> Part:
    """Consecutive layers on each rank along `pp`, by torch.distributed.pipelining; not `shaped`:
    the stages ask each other for the shapes of what they send."""
    size, index = mesh["pp"].size(), mesh.get_local_rank("pp")
    layers, rest = divmod(len(net), size)  # the first `rest` stages have one more
    begin, end = (at * layers + min(at, rest) for at in (index, index + 1))
    stage_module = nn.Sequential(*list(net)[begin:end])
    rows = BATCH // STAGE_MICRO_BATCHES
    widths = [FEATURES, *([WIDTH] * (size - 1)), CLASSES]
    takes, gives = list(pairwise(widths))[index]
    shapes: dict[str, Any] = {
        "input_args": torch.empty(rows, LENGTH, takes, requires_grad=index > 0),
        "output_args": torch.empty(rows, LENGTH, gives, requires_grad=True),
    }
    stage = PipelineStage(
        stage_module,
        index,
        size,
        torch.device("cpu"),
        group=mesh["pp"].get_group(),
        **(shapes if shaped else {}),
    )
    schedule = schedule_of(stage, STAGE_MICRO_BATCHES, loss_fn=loss_of)
    replicas = mesh["dp"].get_group() if "dp" in (mesh.mesh_dim_names or ()) else None

    def backward(x: Tensor, y: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        inputs = (x,) if stage.is_first else ()
        targets = {"target": y, "losses": losses} if stage.is_last else {}
        schedule.step(*inputs, **targets)
        average_gradients(stage_module, replicas)
        return torch.stack(losses).mean().detach() if stage.is_last else None

    return Part(stage_module, backward)


def average_gradients(module: nn.Module, replicas: dist.ProcessGroup | None) -> None:
    if replicas is None:
        return
    gradients = [local(p.grad) for p in module.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat, group=replicas)
    flat /= replicas.size()
    means = torch.split(flat, [g.numel() for g in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))


def local(tensor: Tensor) -> Tensor:
    """What of it lies on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
