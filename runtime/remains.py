"""What torch's own libraries keep of a step that was cut: forgotten, so that the next begins clean.

fully_shard: a forward that is cut leaves parameters gathered, perhaps by a collective that was
poisoned, and gradients of micro-batches that are not reduced yet lie where no zero_grad finds them.
Pipelining: a schedule keeps the losses of a cut step and takes them for those of the next.
Each is looked at only if the script has imported it.
"""

import gc
import sys
import threading
from collections.abc import Iterable
from typing import Any

from torch import nn


class Sharded:
    """The modules below `roots` that fully_shard made; none of them is the usual case.

    Raises RuntimeError where torch, before 2.13, cannot forget a step of theirs.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        kind = _imported("torch.distributed.fsdp", "FSDPModule")
        self._modules: list[Any] = []
        if kind is not None:
            self._modules = [m for root in roots for m in root.modules() if isinstance(m, kind)]
        if self._modules and not hasattr(kind, "reset_iter_state"):
            raise RuntimeError(
                "expected torch 2.13 or newer for fully_shard, got one whose modules lack "
                "reset_iter_state: an undone step would leave gathered parameters behind"
            )
        self._lock = threading.Lock()

    def settle(self) -> None:
        """Parameters are the sharded ones, and no gradient is held back. Between steps, by the
        training thread, or by others while it is parked."""
        with self._lock:
            for module in self._modules:
                _settle(module)


def forget_losses() -> None:
    """Of every schedule of torch's pipelining that there is. Takes 40 ms where it is imported."""
    schedule = _imported("torch.distributed.pipelining.schedules", "_PipelineSchedule")
    if schedule is not None:
        for found in gc.get_referrers(*_below(schedule)):
            if isinstance(found, schedule):
                found._internal_losses.clear()


def _imported(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def _below(kind: type) -> list[type]:
    children: list[type] = kind.__subclasses__()
    return [kind, *(found for child in children for found in _below(child))]


def _settle(module: Any) -> None:
    state = module._get_fsdp_state()
    if state._is_root:
        module.reset_iter_state()
    for group in state._fsdp_param_groups:
        for parameter in group.fsdp_params:
            # reset_iter_state of torch 2.13 leaves these two, though it says otherwise
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
