"""What `train(ctx)` gets: the rank's place in the layout, its groups, and the loop of steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainmover.runtime.batches import Batches
from trainmover.runtime.binding import Binding
from trainmover.runtime.gate import Gate
from trainmover.runtime.seat import Role
from trainmover.runtime.step import Step
from trainmover.runtime.tracked import Tracked
from trainmover.schemas.layout import Layout

DATA_SEED = 0
"""Shuffling that the loader's own sampler does not seed comes from (this, epoch)."""


class Run(Protocol):
    """One run of `train`, as a rank or standby of a job or unprotected."""

    axis_groups: dict[str, dist.ProcessGroup]
    after_hooks: list[tuple[Step, Callable[[], None]]]

    @property
    def role(self) -> Role: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def generation(self) -> int: ...
    @property
    def shadowing(self) -> bool: ...
    @property
    def binding(self) -> Binding: ...
    @property
    def tracked(self) -> Tracked: ...
    @property
    def gate(self) -> Gate: ...

    def steps(self, total: int, closing: bool) -> Iterator[Step]: ...
    def beat(self, phase: str) -> None: ...


class Context:
    """Valid during one run of `train`. Nothing else is public."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._mesh: DeviceMesh | None = None

    # ---- place

    @property
    def rank(self) -> int:
        self._run.binding.check("ctx.rank")
        return self._run.role.rank

    @property
    def world_size(self) -> int:
        return self._run.role.layout.world_size

    @property
    def local_rank(self) -> int:
        """Index of this worker on its machine; unique there."""
        return self._run.local_rank

    @property
    def device(self) -> torch.device:
        return self._run.device

    @property
    def layout(self) -> Layout:
        return self._run.role.layout

    @property
    def generation(self) -> int:
        return self._run.generation

    @property
    def shadow(self) -> bool:
        """True on a standby and in shadow steps: what runs now leaves nothing behind."""
        return self._run.shadowing

    def coordinate(self, axis: str) -> int:
        rank, layout = self._run.role.rank, self.layout
        self._run.binding.check_coordinate(axis, rank, layout)
        return layout.coordinate(rank, axis)

    def size(self, axis: str) -> int:
        return self.layout.size(axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The group of ranks that differ from this one along `axis` only. Set-up, collective on
        first use of the axis: every rank asks for the same axes in the same order."""
        if axis not in self._run.axis_groups:
            own = self.layout.peers(self._run.role.rank, axis)
            if len(own) == self.world_size:
                world = dist.group.WORLD
                assert world is not None
                self._run.axis_groups[axis] = world
            else:
                for ranks in dict.fromkeys(
                    self.layout.peers(rank, axis) for rank in range(self.world_size)
                ):
                    group = dist.new_group(list(ranks))
                    if ranks == own:
                        self._run.axis_groups[axis] = group
        return self._run.axis_groups[axis]

    @property
    def mesh(self) -> DeviceMesh:
        """The layout as a DeviceMesh with the same axis names. Set-up, collective on first use.

        It knows its rank: RuntimeError in a script that promises `rebindable`.
        """
        self._run.binding.check("ctx.mesh")
        if self._mesh is None:
            axes = self.layout.axes
            self._mesh = init_device_mesh(
                self.device.type,
                tuple(a.size for a in axes),
                mesh_dim_names=tuple(a.name for a in axes),
            )
        return self._mesh

    # ---- state

    def track(
        self, *, undo: tuple[str, ...] = (), sharded_over: tuple[str, ...] = (), **objects: object
    ) -> None:
        """What moves with the rank: modules, optimizers, anything with state_dict.

        `undo` names optimizers between whose steps and another's a collective stands (GANs).
        `sharded_over` names the axes along which the objects differ; default: those that do not
        replicate. Raises with the path to a value that cannot be moved.
        """
        for axis in sharded_over:
            self.layout.size(axis)
        self._run.tracked.add(undo=undo, sharded_over=sharded_over, **objects)

    @property
    def vars(self) -> dict[str, Any]:
        """A small dict of the rank's own that is rolled back and moves with the rank."""
        return self._run.tracked.vars

    def batches(self, source: Any) -> Batches:
        """An endless iterator over `source`, a loader or a function that makes one.

        Accepts a map-style torch DataLoader, torchdata's StatefulDataLoader, or anything iterable
        with state_dict and load_state_dict. An undone block gets its batches again.
        """
        with self._run.binding.asking():
            batches = Batches(source, DATA_SEED, self._run.gate.guard_batches)
        self._run.tracked.add_batches(batches)
        return batches

    # ---- the loop

    def steps(self, total: int, *, closing: bool = False) -> Iterator[Step]:
        """Every step until it is committed, the same one again when it was undone.

        `total` counts optimizer updates of the whole job; with `closing` one block more follows.
        Before the first, on every worker, some shadow steps run whose effects are undone.
        """
        if total < 0:
            raise ValueError(f"total counts updates and is not negative, got {total}")
        return self._run.steps(total, closing)

    def on_assigned(self, function: Callable[[], object]) -> None:
        """Run `function` before the first step, once the rank is fixed: at the start, and again at
        a promotion. Open writers there, seed by rank there."""
        self._run.binding.on_assigned.append(function)

    def after(self, step: Step, function: Callable[[], None]) -> None:
        """Run `function` when `step` is committed; not at all when it is undone."""
        if not step.shadow:
            self._run.after_hooks.append((step, function))

    @contextmanager
    def long_operation(self, seconds: float) -> Iterator[None]:
        """Says that the rank makes no progress for up to `seconds`, and that this is no hang."""
        self._run.beat(f"long:{seconds:g}")
        yield
        self._run.beat("step")
