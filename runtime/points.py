"""Hooks that let an armed fault fire in the middle of a forward, a backward or an update.

Put in place only for a step that has such a fault, and gone with it.
"""

from collections.abc import Callable
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook

from trainmover.runtime import exchange
from trainmover.runtime.faults import Faults
from trainmover.runtime.tracked import Tracked


def arm_points(faults: Faults, tracked: Tracked) -> Callable[[], None] | None:
    """Returns what is to be called between the vote's result and the update, if anything."""
    if faults.armed("forward"):
        _once_in_forward(faults)
    if faults.armed("backward"):
        _once_in_backward(faults, tracked)
    if frame := faults.armed("frame"):
        _inside_frame(faults, frame.bytes)
    return _half_an_update(faults, tracked) if faults.armed("optimizer") else None


def _once_in_forward(faults: Faults) -> None:
    """Fires when the first module without children is called: the forward is under way."""

    def hook(module: Any, args: Any) -> None:
        if next(module.children(), None) is None:
            handle.remove()
            faults.hit("forward")

    handle = register_module_forward_pre_hook(hook)


def _once_in_backward(faults: Faults, tracked: Tracked) -> None:
    """Fires when the gradient of a parameter in the middle is there."""
    parameters = [p for o in tracked.optimizers for g in o.param_groups for p in g["params"]]

    def hook(parameter: Any) -> None:
        handle.remove()
        faults.hit("backward")

    handle = parameters[len(parameters) // 2].register_post_accumulate_grad_hook(hook)


def _inside_frame(faults: Faults, after_bytes: int) -> None:
    def hook(channel: str, sent: int) -> None:
        if sent >= after_bytes:
            exchange.frame_hook = None
            faults.hit("frame")

    exchange.frame_hook = hook


def _half_an_update(faults: Faults, tracked: Tracked) -> Callable[[], None]:
    """Called once the commit is known: the first optimizer steps half of its parameters, then the
    fault fires."""

    def halve() -> None:
        optimizer = tracked.optimizers[0]
        full = [list(group["params"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = group["params"][: len(group["params"]) // 2]

        def after(_optimizer: Any, args: Any, kwargs: Any) -> None:
            faults.hit("optimizer")
            for group, parameters in zip(optimizer.param_groups, full, strict=True):
                group["params"] = parameters
            post.remove()

        post = optimizer.register_step_post_hook(after)

    return halve
