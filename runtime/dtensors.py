"""DTensor, where a script uses it: sums that its gradients still owe, groups that its caches keep.

Nothing here imports it: that takes more than a second.
"""

import sys
from collections.abc import Iterable

import torch


def among(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(t for t in tensors if hasattr(t, "placements"))


def sum_partial(parameters: Iterable[torch.Tensor]) -> None:
    """Gradients of these DTensors become whole. Collective, but for those that are whole already.

    Sequence parallelism leaves those of norms as partial sums; the optimizer would add them up,
    after the vote, where a rank that is cut off must take its state from another one.
    """
    for parameter in parameters:
        gradient: torch.Tensor | None = parameter.grad
        if gradient is not None and any(p.is_partial() for p in gradient.placements):  # type: ignore[attr-defined]
            whole = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
            parameter.grad = whole


def forget_groups() -> None:
    """The groups of this process are destroyed, and the next may be those of another rank: cached
    meshes compare equal to that rank's."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
