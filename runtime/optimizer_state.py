"""An optimizer's state by position in its param_groups, and the undo copy of a declared one.

Written tensor by tensor: `Optimizer.load_state_dict` would cast it to the parameter's dtype.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from trainmover.runtime import plain, raw
from trainmover.runtime.codec import TensorSpec

Place = Callable[[TensorSpec, object, torch.Tensor | None, str], torch.Tensor]
"""(what comes, what is here, the parameter it belongs to, its path) -> where its bytes go."""


def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters, in the order that numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def describe(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Groups without parameters and, by position, the state (None before a first step); live."""
    return {
        "groups": [
            {**{k: v for k, v in group.items() if k != "params"}, "params": len(group["params"])}
            for group in optimizer.param_groups
        ],
        "state": [
            dict(optimizer.state[p]) if p in optimizer.state else None
            for p in parameters(optimizer)
        ],
    }


def adopt(
    optimizer: torch.optim.Optimizer, described: dict[str, Any], place: Place, path: str
) -> None:
    """Makes groups and state entries those of `described`, whose tensors are TensorSpecs.

    Tensors that fit are kept, so their bytes go straight into place. ValueError for other groups.
    """
    counts = [group["params"] for group in described["groups"]]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if counts != here:
        raise ValueError(
            f"{path}: expected groups of {counts} parameters as at the donor, got {here}; build "
            "the optimizer from the same parameters on every rank"
        )
    for i, (group, values) in enumerate(
        zip(optimizer.param_groups, described["groups"], strict=True)
    ):
        values = {**values, "params": group["params"]}
        _become(group, values, place, None, f"{path}.param_groups[{i}]")
    for i, (p, values) in enumerate(zip(parameters(optimizer), described["state"], strict=True)):
        if values is None:
            optimizer.state.pop(p, None)
        else:
            _become(optimizer.state[p], values, place, p, f"{path}.state[{i}]")


def _become(
    live: dict[str, Any],
    values: dict[str, Any],
    place: Place,
    like: torch.Tensor | None,
    path: str,
) -> None:
    for key in live.keys() - values.keys():
        del live[key]
    for key, value in values.items():
        if isinstance(value, TensorSpec):
            value = place(value, live.get(key), like, f"{path}[{key!r}]")
        live[key] = value


class KeptGroups(NamedTuple):
    """The param_groups of an optimizer without parameters: learning rates and their like."""

    groups: list[dict[str, Any]]
    values: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> "KeptGroups":
        groups = list(optimizer.param_groups)
        kept = [group.copy() for group in groups]
        for values in kept:
            del values["params"]
            for key, value in values.items():
                if type(value) not in plain.ATOMS:
                    values[key] = _kept(value)
        return cls(groups, kept)

    def put_back(self) -> None:
        """A tensor (a capturable learning rate) is the same object again, with its old content."""
        for group, values in zip(self.groups, self.values, strict=True):
            for key in group.keys() - values.keys() - {"params"}:
                del group[key]
            group.update({key: _restored(value) for key, value in values.items()})


class UndoCopy:
    """Parameters and state of one optimizer as they were before its first step in a block."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._copies: dict[tuple[int, str | None], torch.Tensor] = {}
        self._kept: list[tuple[torch.Tensor, Any, dict[str, Any] | None]] | None = None

    def keep(self) -> None:
        """Copies once a block; the memory is allocated once."""
        if self._kept is None:
            state = self._optimizer.state
            self._kept = [
                (
                    p,
                    self._copy((i, None), p),
                    {k: self._copy((i, k), v) for k, v in state[p].items()} if p in state else None,
                )
                for i, p in enumerate(parameters(self._optimizer))
            ]

    def forget(self) -> None:
        """A new block begins."""
        self._kept = None

    def put_back(self) -> None:
        """Writes back what was kept in this block, if anything was."""
        for p, kept, entries in self._kept or ():
            _restored(kept)
            if entries is None:
                self._optimizer.state.pop(p, None)
            else:
                self._optimizer.state[p] = {k: _restored(v) for k, v in entries.items()}
        self._kept = None

    def _copy(self, key: tuple[int, str | None], value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return plain.deepcopy(value)
        local = raw.local(value)
        memory = self._copies.get(key)
        if memory is None or memory.shape != local.shape or memory.dtype != local.dtype:
            memory = self._copies[key] = torch.empty_like(local)
        return _Tensor(value, memory.copy_(local))


@dataclass(frozen=True, slots=True)
class _Tensor:
    live: torch.Tensor
    content: torch.Tensor


def _kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Tensor(value, raw.local(value).clone())
    return plain.deepcopy(value)


def _restored(value: Any) -> Any:
    if isinstance(value, _Tensor):
        raw.local(value.live).copy_(value.content)
        return value.live
    return value
