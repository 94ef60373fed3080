"""Kinds of modules and optimizers that could be tracked, and would go wrong at the first death."""

from torch import nn
from torch.optim import Optimizer

ADVICE = {
    "FullyShardedDataParallel": (
        "keeps its parameters in flat buffers that an undone step leaves gathered; use "
        "torch.distributed.fsdp.fully_shard"
    ),
    "ZeroRedundancyOptimizer": (
        "communicates while it updates, after the vote, and no other rank holds its part of the "
        "state; use fully_shard over dp_shard of a layout dp_replicate=N,dp_shard=M"
    ),
}
"""Class -> why, and what to use. By name: most scripts never import them."""


def check(name: str, value: nn.Module | Optimizer) -> None:
    """Raises TypeError with the path to what cannot be tracked."""
    parts = value.named_modules(prefix=name) if isinstance(value, nn.Module) else [(name, value)]
    for path, part in parts:
        for kind in type(part).__mro__:
            if kind.__module__.startswith("torch.") and kind.__name__ in ADVICE:
                raise TypeError(f"{path} is a {kind.__name__}, which {ADVICE[kind.__name__]}")
