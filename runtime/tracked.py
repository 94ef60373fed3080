"""What moves with a rank: the registry behind ctx.track, ctx.vars and ctx.batches.

*Own* state may differ between replicas and travels each step; *shared* state comes from a donor.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch.nn.parallel import DistributedDataParallel

from trainmover.runtime import codec, dtensors, forgotten, optimizer_state, refused, rng
from trainmover.runtime.batches import Batches
from trainmover.runtime.buffers import Buffers
from trainmover.runtime.optimizer_state import UndoCopy
from trainmover.runtime.remains import Sharded
from trainmover.runtime.shared import Objects, Receiver, Shared, sha256
from trainmover.runtime.small import Gradients, Small
from trainmover.runtime.transfer.donor import Offers
from trainmover.runtime.transfer.registered import Registered

_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_NO_VARS = codec.encode({}, "vars")


class Tracked:
    """All tracked state of this rank. Not thread-safe: the training thread, between collectives."""

    def __init__(self) -> None:
        self.vars: dict[str, Any] = {}
        self.sharded_over: dict[str, tuple[str, ...]] = {}
        self._modules: dict[str, torch.nn.Module] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._others: dict[str, Any] = {}
        self._batches: list[Batches] = []
        self._undo_copies: dict[torch.optim.Optimizer, UndoCopy] = {}
        self._opened: rng.RngState | None = None
        self._own_rng: tuple[rng.RngState | None, dict[str, bytes]] = None, {}
        """The random state that was packed last, and its parts."""
        self._receiver: Receiver | None = None
        self.offers = Offers(self.register)
        """What is registered here for others to pull."""
        self._index()

    def add(
        self, *, undo: tuple[str, ...] = (), sharded_over: tuple[str, ...] = (), **objects: object
    ) -> None:
        """Tracks `objects`; `undo` names those optimizers among them that an abort writes back.

        Raises Unmovable with the path to a value that cannot travel, ValueError for names, and
        TypeError for what is neither module, optimizer, nor has state_dict and load_state_dict.
        """
        for name, value in objects.items():
            self._check_name(name)
            self._check_movable(name, value)
        for name, value in objects.items():
            self.sharded_over[name] = sharded_over
            match value:
                case torch.nn.Module():
                    self._modules[name] = _unwrapped(value)
                case torch.optim.Optimizer():
                    self._optimizers[name] = value
                case _:
                    self._others[name] = value
        for name in undo:
            if name not in objects or name not in self._optimizers:
                raise ValueError(f"undo={name!r}: expected the name of an optimizer of this call")
            self._undo_copies[self._optimizers[name]] = UndoCopy(self._optimizers[name])
        self._index()

    def add_batches(self, batches: Batches) -> None:
        """Tracks the position of a loader."""
        self._batches.append(batches)

    def rebuild_batches(self) -> None:
        """Make the loaders again that a factory made, for the rank that holds now."""
        for batches in self._batches:
            batches.rebuild()

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """All tracked optimizers, in the order they were tracked."""
        return tuple(self._optimizers.values())

    def check(self) -> None:
        """For the first step. ValueError names what drives or fills tracked state but is not
        tracked itself: learning rate schedulers, and parameters that no tracked module has."""
        self._index()
        forgotten.check_schedulers(self._optimizers, self._others.values())
        forgotten.check_parameters(self._optimizers, self._modules.values())

    def open_for_good(self) -> None:
        """A block opens that is never undone. ValueError for a gradient that is not zero."""
        self._gradients.keep()
        for batches in self._batches:
            batches.open()

    def open(self) -> None:
        """A block opens: as `open_for_good`, and keeps the small state."""
        self.open_for_good()
        for undo_copy in self._undo_copies.values():
            undo_copy.forget()
        self._small.keep()
        self._opened = rng.capture()

    def undo(self) -> None:
        """Everything is again what it was at `open`, bit for bit; batches will come again."""
        if self._opened is None:
            raise RuntimeError("undo before the first open: there is nothing to go back to")
        self._sharded.settle()
        self._gradients.put_back()
        for undo_copy in self._undo_copies.values():
            undo_copy.put_back()
        self._small.put_back()
        for batches in self._batches:
            batches.undo()
        rng.restore(self._opened)

    def before_first_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """True for an optimizer declared with undo=, which is now copied (once a block)."""
        undo_copy = self._undo_copies.get(optimizer)
        if undo_copy is None:
            return False
        undo_copy.keep()
        return True

    def own(self) -> dict[str, bytes]:
        """Own state as it is now, in parts that change seldom or often. Raises Unmovable (vars)."""
        return self._own(rng.capture())

    def own_at_opening(self) -> dict[str, bytes]:
        """`own` right after `open`, from what that has captured already."""
        assert self._opened is not None
        return self._own(self._opened)

    def _own(self, state: rng.RngState) -> dict[str, bytes]:
        if state is not self._own_rng[0]:
            self._own_rng = state, {"rng." + k: v for k, v in rng.to_parts(state).items()}
        parts = self._own_rng[1].copy()
        for i, batches in enumerate(self._batches):
            parts[f"batches.{i}"] = batches.position()
        parts["vars"] = codec.encode(self.vars, "vars") if self.vars else _NO_VARS
        for name, part in self._buffers.parts().items():
            parts["buffer." + name] = part
        return parts

    def load_own(self, parts: Mapping[str, bytes]) -> None:
        """Takes over the own state of a rank: iterators are made first, RNG is put back last."""
        loaders = _below("batches.", parts)
        if len(loaders) != len(self._batches):
            raise ValueError(
                f"expected {len(self._batches)} loaders (calls of ctx.batches), got {len(loaders)}"
            )
        for i, batches in enumerate(self._batches):
            batches.load_position(loaders[str(i)])
        self._buffers.load(_below("buffer.", parts))
        variables = codec.decode(parts["vars"])
        self.vars.clear()
        self.vars.update(variables)
        rng.restore(rng.from_parts(_below("rng.", parts)))

    def shared(self, objects: tuple[str, ...] = ()) -> Shared:
        """The donor's view of the shared state, or of these `objects`; tensors are live."""
        self._sharded.settle()
        return self._objects.only(objects).shared()

    def register(self, objects: tuple[str, ...] = ()) -> Registered:
        """`shared`, laid open for reads by descriptor. Raises ValueError for unknown names."""
        return self.shared(objects).register()

    def receive(self, meta: bytes, objects: tuple[str, ...] = ()) -> list[torch.Tensor]:
        """Fits this rank to a donor's `meta`; returns where its tensors' bytes go, in its order.

        Raises ValueError naming what differs from the donor.
        """
        self._sharded.settle()
        self._receiver = Receiver(self._objects.only(objects), meta)
        return self._receiver.destinations

    def received(self) -> None:
        """The bytes are in: loads what could not be written in place."""
        if self._receiver is None:
            raise RuntimeError("received without receive: no transfer is under way")
        self._receiver.finish()
        self._receiver = None

    def shared_digest(self) -> str:
        """xxh3_128 of the shared state, hex; equal on donor and joiner."""
        return self.shared().digest()

    def object_digests(self) -> dict[str, str]:
        """Tracked name -> xxh3_128 of its shared state; equal on ranks that hold the same shard."""
        self._sharded.settle()
        found = {n: Objects({n: m}, {}, {}) for n, m in self._modules.items()}
        found |= {n: Objects({}, {n: o}, {}) for n, o in self._optimizers.items()}
        found |= {n: Objects({}, {}, {n: o}) for n, o in self._others.items()}
        return {name: objects.shared().digest() for name, objects in found.items()}

    def own_digests(self) -> dict[str, str]:
        """Part of the own state -> its xxh3_128; no name of a tracked object is among them."""
        own = self._own_in_order()
        own["ctx.vars"] = own.pop("vars")
        return {name: xxhash.xxh3_128_hexdigest(part) for name, part in own.items()}

    def state_digest(self) -> str:
        """sha256 of everything tracked, shared and own, random state and data position included."""
        return sha256(self.shared(), self._own_in_order())

    def _own_in_order(self) -> dict[str, bytes]:
        """`own`, not depending on the insertion order of `vars`."""
        own = self.own()
        own["vars"] = codec.canonical(own["vars"])[0]
        return own

    def _index(self) -> None:
        """What follows from the registry, so that no block walks module trees."""
        self._sharded = Sharded(self._modules.values())
        self._sharded.settle()
        self._objects = Objects(self._modules, self._optimizers, self._others)
        self._buffers = Buffers(self._modules)
        self._small = Small(self._buffers, self.optimizers, self._others, self.vars)
        named: dict[str, torch.Tensor] = {
            f"{name}.{path}": p
            for name, module in self._modules.items()
            for path, p in module.named_parameters()
        }
        known = {id(p) for p in named.values()}
        for name, optimizer in self._optimizers.items():
            for i, p in enumerate(optimizer_state.parameters(optimizer)):
                if id(p) not in known:
                    named[f"{name}'s parameter {i}"] = p
        self._gradients = Gradients(named)
        self.dtensors = dtensors.among(named.values())

    def _check_name(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a name for ctx.track: expected [a-z_][a-z0-9_]*")
        if name in self.sharded_over:
            raise ValueError(f"{name!r} is tracked already; give the second object another name")

    def _check_movable(self, name: str, value: Any) -> None:
        match value:
            case torch.nn.Module():
                refused.check(name, value)
                _check_module(name, _unwrapped(value))
            case torch.optim.Optimizer():
                refused.check(name, value)
                codec.encode(optimizer_state.describe(value), name, [])
            case _ if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
                codec.encode(value.state_dict(), name, [])
            case _:
                raise TypeError(
                    f"{name} is a {type(value).__name__}; ctx.track takes modules, optimizers, and "
                    "what has state_dict and load_state_dict (schedulers, GradScaler); put plain "
                    "values into ctx.vars and loaders into ctx.batches"
                )


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside DDP and torch.compile, so that wrapped and bare have the same names."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif "_orig_mod" in module._modules:
            module = module.get_submodule("_orig_mod")
        else:
            return module


def _check_module(name: str, module: torch.nn.Module) -> None:
    for path, part in module.named_modules(prefix=name):
        if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
            raise codec.Unmovable(path, "a module with extra state outside parameters and buffers")
    codec.encode(dict(module.named_parameters()), name, [])
    codec.encode(dict(module.named_buffers()), name, [])


def _below(prefix: str, parts: Mapping[str, bytes]) -> dict[str, bytes]:
    return {k.removeprefix(prefix): v for k, v in parts.items() if k.startswith(prefix)}
