"""The small state: copied at the opening of a block, put back exactly when it is undone.

Order of design/commit.md "Within a step" 4. Parameters and optimizer state are not in it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from trainmover.runtime import plain
from trainmover.runtime.buffers import Buffers
from trainmover.runtime.optimizer_state import KeptGroups


class Small:
    """Everything tracked that is neither parameter, gradient, loader nor random state."""

    def __init__(
        self,
        buffers: Buffers,
        optimizers: Iterable[torch.optim.Optimizer],
        objects: Mapping[str, Any],
        variables: dict[str, Any],
    ) -> None:
        self._buffers = buffers
        self._optimizers = tuple(optimizers)
        self._objects = tuple(objects.values())
        self._variables = variables
        self._kept_groups: list[KeptGroups] = []
        self._kept_objects: list[Any] = []
        self._kept_variables: dict[str, Any] = {}

    def keep(self) -> None:
        self._buffers.keep()
        self._kept_groups = [KeptGroups.of(optimizer) for optimizer in self._optimizers]
        self._kept_objects = [plain.deepcopy(o.state_dict()) for o in self._objects]
        self._kept_variables = plain.deepcopy(self._variables) if self._variables else {}

    def put_back(self) -> None:
        self._buffers.put_back()
        for groups in self._kept_groups:
            groups.put_back()
        for o, state in zip(self._objects, self._kept_objects, strict=True):
            o.load_state_dict(state)
            if isinstance(o, torch.amp.GradScaler):
                # not in its state_dict; left as "unscaled", the retry would skip unscaling
                o._per_optimizer_states.clear()
        self._variables.clear()
        self._variables.update(self._kept_variables)


class Gradients:
    """Gradients at the opening of a block: each is None or zero, and becomes so again."""

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        self._names, self._parameters = tuple(named), tuple(named.values())
        self._kept: list[torch.Tensor | None] = []

    def keep(self) -> None:
        """Reads all gradients that are not None. ValueError for one that is not zero."""
        self._kept = [p.grad for p in self._parameters]
        for i, grad in enumerate(self._kept):
            if grad is not None and bool(_values(grad).any()):
                raise ValueError(
                    f"the gradient of {self._names[i]} is not zero when the block opens, so an "
                    "undo would lose it; accumulate gradients inside the block (all micro-batches "
                    "of a step in one `with step`)"
                )

    def put_back(self) -> None:
        for p, grad in zip(self._parameters, self._kept, strict=True):
            if grad is not None:
                grad.zero_()
            p.grad = grad


def _values(grad: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(grad, "to_local", lambda: grad)()
    return local._values() if local.is_sparse else local
