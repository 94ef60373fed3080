"""What ranks without a vote agree on in each block: the end of the loop, and averages."""

from collections.abc import Mapping

import torch
import torch.distributed as dist


class Averages:
    """One small all_reduce a block, of one slot for each name reported so far; more of them only in
    a block in which a rank reports a new name. `group` is of CPU tensors; None: one rank alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._names: list[str] = []
        """The same on all ranks, in the same order."""

    def agree(self, stop: bool, numbers: Mapping[str, float]) -> tuple[bool, dict[str, float]]:
        """Collective. Whether any rank said `stop`, and each number averaged over the ranks that
        reported it."""
        if self._group is None:
            return stop, dict(numbers)
        while True:
            unknown = [name for name in numbers if name not in self._names]
            sums = [numbers.get(name, 0.0) for name in self._names]
            counts = [name in numbers for name in self._names]
            slots = torch.tensor([stop, len(unknown), *sums, *counts], dtype=torch.float64)
            dist.all_reduce(slots, group=self._group)
            stopping, strangers, *rest = slots.tolist()
            if not strangers:
                break
            self._learn(unknown)
        named = zip(self._names, rest, rest[len(self._names) :], strict=False)
        return stopping > 0, {name: total / count for name, total, count in named if count}

    def _learn(self, unknown: list[str]) -> None:
        found: list[list[str]] = [[]] * dist.get_world_size(self._group)
        dist.all_gather_object(found, unknown, group=self._group)
        self._names += dict.fromkeys(name for names in found for name in names)
