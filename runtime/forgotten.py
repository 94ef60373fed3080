"""What drives or fills tracked state but is not tracked itself: a joiner would not have it."""

from collections.abc import Collection, Iterable, Mapping

import torch
from torch.optim.lr_scheduler import LRScheduler


def check_schedulers(
    optimizers: Mapping[str, torch.optim.Optimizer], objects: Collection[object]
) -> None:
    """ValueError names an optimizer whose scheduler is not among `objects`. A scheduler wraps
    `step` of its optimizer, which tells that there is one."""
    driven = {id(o.optimizer) for o in objects if isinstance(o, LRScheduler)}
    driven |= {id(o) for held in objects for o in _inner_optimizers(held)}
    for name, optimizer in optimizers.items():
        wrapped = hasattr(optimizer.step, "_wrapped_by_lr_sched")
        if wrapped and id(optimizer) not in driven:
            raise ValueError(
                f"a learning rate scheduler drives the tracked optimizer {name!r} but is not "
                "tracked: a joiner would start its schedule again; add it to ctx.track("
                "scheduler=scheduler)"
            )


def check_parameters(
    optimizers: Mapping[str, torch.optim.Optimizer], modules: Iterable[torch.nn.Module]
) -> None:
    """ValueError names parameters of `optimizers` that none of `modules` has."""
    known = {id(p) for module in modules for p in module.parameters()}
    strangers = [
        f"{name}.param_groups[{i}]['params'][{j}] of shape {list(p.shape)}"
        for name, optimizer in optimizers.items()
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
        if id(p) not in known
    ]
    if strangers:
        raise ValueError(
            f"{len(strangers)} parameters of tracked optimizers are in no tracked module and "
            f"would not move with the rank: {', '.join(strangers[:5])}; track the module that "
            "they belong to"
        )


def _inner_optimizers(value: object) -> list[object]:
    """Optimizers behind schedulers that a tracked object holds (SequentialLR, a trainer's)."""
    held = list(vars(value).values()) if hasattr(value, "__dict__") else []
    flat = [x for item in held for x in (item if isinstance(item, list | tuple) else [item])]
    return [x.optimizer for x in flat if isinstance(x, LRScheduler)]
