"""Shared state of a rank, which comes from a donor: its structure as text, its tensors as bytes."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trainmover.runtime import codec, optimizer_state, raw
from trainmover.runtime.codec import TensorSpec
from trainmover.runtime.transfer.registered import Registered


class Hash(Protocol):
    """What hashlib and xxhash have in common."""

    def update(self, data: Any, /) -> None: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Shared:
    """The donor's view: `tensors` are live and local, in the order that `meta` numbers them."""

    meta: bytes
    tensors: list[torch.Tensor]

    def feed(self, hasher: Hash) -> None:
        """All of it, in an order that does not depend on the insertion order of dicts."""
        meta, order = codec.canonical(self.meta)
        hasher.update(meta)
        for index in order:
            for _, piece in raw.pieces(self.tensors[index]):
                hasher.update(piece)

    def register(self) -> Registered:
        """For reads by descriptor; to be used only while no byte of it changes."""
        return Registered(self.meta, self.tensors)

    def digest(self) -> str:
        """xxh3_128, hex: equal on donor and joiner if and only if their shared state is."""
        return self.register().digest()


@dataclass(frozen=True, slots=True)
class Objects:
    """What of a rank is shared, by tracked name."""

    modules: Mapping[str, torch.nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer]
    others: Mapping[str, Any]

    def only(self, names: Collection[str]) -> "Objects":
        """Those of these names; of none, all. Raises ValueError for a name that is not tracked."""
        if not names:
            return self
        if unknown := set(names) - {*self.modules, *self.optimizers, *self.others}:
            raise ValueError(f"{sorted(unknown)[:3]} are not tracked here")
        return Objects(
            {n: m for n, m in self.modules.items() if n in names},
            {n: o for n, o in self.optimizers.items() if n in names},
            {n: o for n, o in self.others.items() if n in names},
        )

    def shared(self) -> Shared:
        """No copies but those that state_dict of a tracked object makes. Raises Unmovable."""
        tensors: list[torch.Tensor] = []
        value = {
            "modules": {n: dict(m.named_parameters()) for n, m in self.modules.items()},
            "optimizers": {n: optimizer_state.describe(o) for n, o in self.optimizers.items()},
            "objects": {n: o.state_dict() for n, o in self.others.items()},
        }
        return Shared(codec.encode(value, "tracked", tensors), tensors)


class Receiver:
    """Fits a rank's objects to a donor's `meta`; `destinations` take the bytes, in its order.

    Objects whose state_dict has tensors are loaded by `finish`, once the bytes are in.
    Raises ValueError with the name of what differs in a way that no transfer mends.
    """

    def __init__(self, objects: Objects, meta: bytes) -> None:
        self._objects = objects
        self._places: dict[int, torch.Tensor] = {}
        self._late: dict[str, Any] = {}
        value = codec.decode(meta, lambda spec: spec)
        for section, here in (
            ("modules", objects.modules),
            ("optimizers", objects.optimizers),
            ("objects", objects.others),
        ):
            _same_names(section, value[section], here)
        for name, module in objects.modules.items():
            self._module(name, module, value["modules"][name])
        for name, optimizer in objects.optimizers.items():
            optimizer_state.adopt(optimizer, value["optimizers"][name], self._place, name)
        for name, state in value["objects"].items():
            self._object(name, state)
        self.destinations = [self._places[i] for i in range(len(self._places))]

    def finish(self) -> None:
        for name, state in self._late.items():
            self._objects.others[name].load_state_dict(state)
        self._late.clear()

    def _module(self, name: str, module: torch.nn.Module, specs: dict[str, TensorSpec]) -> None:
        here = dict(module.named_parameters())
        _same_names(name, specs, here)
        for path, spec in specs.items():
            if not _fits(here[path], spec):
                mine = here[path]
                raise ValueError(
                    f"{name}.{path}: expected {spec.dtype} of shape {list(spec.shape)} on "
                    f"{spec.device} as at the donor, got {mine.dtype} of {list(mine.shape)} on "
                    f"{mine.device}"
                )
            self._places[spec.index] = raw.local(here[path])

    def _object(self, name: str, state: Any) -> None:
        before = len(self._places)
        state = _filled(state, lambda spec: self._place(spec, None, None, name))
        if len(self._places) > before:
            self._late[name] = state
        else:
            self._objects.others[name].load_state_dict(state)

    def _place(
        self, spec: TensorSpec, live: object, like: torch.Tensor | None, path: str
    ) -> torch.Tensor:
        if isinstance(live, torch.Tensor) and _fits(live, spec):
            tensor = live
        else:
            tensor = _new(spec, like, path)
        self._places[spec.index] = raw.local(tensor)
        return tensor


def _same_names(what: str, there: Mapping[str, object], here: Mapping[str, object]) -> None:
    if there.keys() != here.keys():
        missing, extra = sorted(there.keys() - here.keys()), sorted(here.keys() - there.keys())
        raise ValueError(
            f"{what}: the donor has {missing[:3]} that this rank has not, this rank has "
            f"{extra[:3]} that the donor has not; every rank of a shard tracks the same"
        )


def _placements(tensor: torch.Tensor) -> str | None:
    placements = getattr(tensor, "placements", None)
    return None if placements is None else str(placements)


def _fits(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    local = raw.local(tensor)
    return (local.dtype, tuple(local.shape), local.device.type, _placements(tensor)) == (
        spec.dtype,
        spec.shape,
        spec.device,
        spec.placements,
    )


def _new(spec: TensorSpec, like: torch.Tensor | None, path: str) -> torch.Tensor:
    """Memory for `spec`, with strides and placements of the parameter that has its shape."""
    if like is not None:
        made = torch.empty_like(like, dtype=spec.dtype, requires_grad=False)
        if _fits(made, spec):
            return made
    if spec.placements is not None:
        raise ValueError(f"{path}: no tensor here is placed as the donor's {spec.placements}")
    device = like.device if like is not None and like.device.type == spec.device else spec.device
    return torch.empty(spec.shape, dtype=spec.dtype, device=device)


def _filled(value: Any, place: Any) -> Any:
    """`value` with a tensor for every TensorSpec in it, inside dicts, lists and tuples."""
    if isinstance(value, TensorSpec):
        return place(value)
    if isinstance(value, dict):
        for key in value:
            value[key] = _filled(value[key], place)
        return value
    if type(value) in (list, tuple):
        return type(value)(_filled(item, place) for item in value)
    return value


def sha256(shared: Shared, parts: Mapping[str, bytes]) -> str:
    """Hex digest over shared and own state, the latter by the names of its parts."""
    hasher = hashlib.sha256()
    shared.feed(hasher)
    for name in sorted(parts):
        hasher.update(f"{name} {len(parts[name])}\n".encode())
        hasher.update(parts[name])
    return hasher.hexdigest()
