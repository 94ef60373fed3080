"""The gate in front of every optimizer step: nothing is applied before the vote said commit.

One global optimizer pre-hook for whatever is stepped inside a block, and for tracked optimizers
an instance hook kept last, so that a user's hook still runs before the vote (both measured on
torch 2.13; docs/design/commit.md, rule 3). A closure is replaced by one that votes after its
first return, since pre-hooks fire before its forward and backward.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook


class Votes(Protocol):
    """An open block."""

    def ready(self, optimizer: Optimizer | None = None) -> None: ...


class Gate:
    """`block` is the open one, None between blocks; `close` takes the hooks away."""

    def __init__(self) -> None:
        self.block: Votes | None = None
        self.running = False
        """The loop has begun: an update outside a block would be lost or done twice."""
        self._tracked: dict[Optimizer, int] = {}
        self._handles: list[Any] = [register_optimizer_step_pre_hook(self._any)]

    def watch(self, optimizers: tuple[Optimizer, ...]) -> None:
        for optimizer in optimizers:
            if optimizer not in self._tracked:
                handle = optimizer.register_step_pre_hook(self._last)
                self._tracked[optimizer] = handle.id
                self._handles.append(handle)

    def guard_batches(self) -> None:
        """Called at every batch."""
        if self.block is None:
            raise RuntimeError(
                "a batch is drawn inside `with step:`, so that an undone step gets it again; "
                "move next(data) into the block"
            )

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _any(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.block is None:
            if self.running:
                raise RuntimeError(
                    "an optimizer was stepped outside `with step:`; an update belongs into the "
                    "block of its step, where it is committed or undone with everything else"
                )
            return
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "an optimizer was stepped inside a backward (a post-accumulate hook): no vote is "
                "possible there; step it after backward() has returned"
            )
        hook = self._tracked.get(optimizer)
        if hook is None:
            raise RuntimeError(
                f"{type(optimizer).__name__} is stepped in a block but not tracked; add it: "
                "ctx.track(optimizer=optimizer)"
            )
        # Optimizer.step walks the instance hooks after the global ones: ours goes last.
        hooks = cast(OrderedDict[int, Any], optimizer._optimizer_step_pre_hooks)
        hooks.move_to_end(hook)

    def _last(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        block = self.block
        if block is None:
            return None
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            block.ready(optimizer)
            return None
        voting = _voting(closure, block, optimizer)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": voting}
        return (args[0], voting, *args[2:]), kwargs


def _voting(closure: Callable[[], Any], block: Votes, optimizer: Optimizer) -> Callable[[], Any]:
    calls = 0

    def voting() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise RuntimeError(
                f"{type(optimizer).__name__} evaluates its closure more than once in a step "
                "(LBFGS does): a part of the update would be applied before the vote"
            )
        loss = closure()
        block.ready(optimizer)
        return loss

    return voting
