"""Ordered named axes and sizes: how ranks map to coordinates, and who replicates whom.

Axis names are torchtitan's (pp, dp_replicate, dp_shard, cp, tp, ep); ranks are row-major.
"""

import re
from math import prod
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

REPLICATING = frozenset({"dp", "dp_replicate"})
"""Axes along which every rank holds the same shard."""

AXIS_NAME = "[a-z][a-z0-9_]*"


class Axis(BaseModel):
    model_config = ConfigDict(frozen=True)

    name: Annotated[str, Field(pattern=f"^{AXIS_NAME}$")]
    size: PositiveInt


class Layout(BaseModel):
    """Axes from the outermost to the innermost; rank 0..world_size-1 is row-major over them."""

    model_config = ConfigDict(frozen=True)

    axes: Annotated[tuple[Axis, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names):
            raise ValueError(f"each axis stands once in a layout, got {','.join(names)}")
        return self

    @classmethod
    def parse(cls, text: str) -> Self:
        """`pp=2,dp=4` -> Layout. Raises ValueError that shows the form expected."""
        axes: list[Axis] = []
        for part in text.split(","):
            name, _, size = part.strip().partition("=")
            if not re.fullmatch(f"{AXIS_NAME}=0*[1-9][0-9]*", part.strip()):
                raise ValueError(
                    "a layout is axis=size,axis=size, names in lower case (for instance"
                    f" pp=2,dp=4), got {text!r}"
                )
            if name in (axis.name for axis in axes):
                raise ValueError(f"each axis stands once in a layout, got {text!r}")
            axes.append(Axis(name=name, size=int(size)))
        return cls(axes=tuple(axes))

    def __str__(self) -> str:
        return ",".join(f"{axis.name}={axis.size}" for axis in self.axes)

    @property
    def world_size(self) -> int:
        return prod(axis.size for axis in self.axes)

    def size(self, axis: str) -> int:
        return self.axes[self._index(axis)].size

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Coordinates of a rank, one per axis. Raises ValueError outside 0..world_size-1."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"layout {self} has ranks 0..{self.world_size - 1}, got {rank}")
        out: list[int] = []
        for axis in reversed(self.axes):
            rank, at = divmod(rank, axis.size)
            out.append(at)
        return tuple(reversed(out))

    def coordinate(self, rank: int, axis: str) -> int:
        return self.coordinates(rank)[self._index(axis)]

    def peers(self, rank: int, axis: str) -> tuple[int, ...]:
        """Ranks that differ from `rank` along `axis` only, itself included, in rank order."""
        index = self._index(axis)
        own = self.coordinates(rank)
        return tuple(
            other
            for other in range(self.world_size)
            if all(
                a == b
                for i, (a, b) in enumerate(zip(own, self.coordinates(other), strict=True))
                if i != index
            )
        )

    def replicas(self, rank: int) -> tuple[int, ...]:
        """All ranks that hold the shard of `rank`, itself included."""
        own = self.shard(rank)
        return tuple(r for r in range(self.world_size) if self.shard(r) == own)

    def shard(self, rank: int) -> str:
        """Key of the shard a rank holds: its coordinates on the axes that do not replicate."""
        pairs = zip(self.axes, self.coordinates(rank), strict=True)
        return ",".join(f"{axis.name}={at}" for axis, at in pairs if axis.name not in REPLICATING)

    def _index(self, axis: str) -> int:
        for index, candidate in enumerate(self.axes):
            if candidate.name == axis:
                return index
        raise ValueError(f"layout {self} has no axis {axis!r}")
