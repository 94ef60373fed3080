"""What the collectives of one rank did in set-up and shadow steps, as a value that travels.

A standby that warms up gets the outputs on it in place of those of ranks that it cannot ask.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

FORMAT = 1
MAX_FLOAT_BYTES = 64 * 1024
"""Of one output. What steers a program is small or of integers; a tape of gradients and parameters
would be as large as the model."""
MAX_BYTES = 1 << 30
"""Of all outputs together."""

_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""What safetensors has had for long; of other dtypes no values are kept."""


class TapeUnusable(Exception):
    """A tape that cannot be had, or is not one for this rank; the message says why."""


class TapeMismatch(BaseException):
    """Unwinds `train`, past every `except Exception`: it does other things than what was recorded.

    The message names the first operation that differs.
    """


@dataclass(frozen=True)
class Key:
    """What a tape is for. Other scripts and layouts do other things."""

    layout: str
    script: str
    """sha256 over script, arguments and layout."""
    role_class: str


@dataclass(frozen=True, eq=False)
class Entry:
    """One collective of one group: `dtype` and `shape` are those of its first tensor."""

    op: str
    dtype: str
    shape: tuple[int, ...]
    values: dict[int, Tensor] = field(default_factory=dict)
    """Place among its outputs -> what it was, contiguous; the rest of them was not kept."""

    def __str__(self) -> str:
        return f"{self.op} of {self.dtype} {list(self.shape)}" if self.dtype else self.op


@dataclass(frozen=True, eq=False)
class Tape:
    """Pure; tensors are not written to."""

    key: Key
    groups: tuple[tuple[Entry, ...], ...]
    """Of each group that the rank is in, in the order of making, its collectives as issued."""
    sizes: tuple[int, ...]
    """Of each group its number of ranks."""
    starts: tuple[tuple[int, ...], ...]
    """For each shadow step: how many collectives each group had issued when it began."""
    whole: bool = True
    """False: over `MAX_BYTES`, later outputs are not there."""

    @property
    def num_bytes(self) -> int:
        """Of the outputs."""
        return sum(v.nbytes for group in self.groups for e in group for v in e.values.values())

    def to_bytes(self) -> bytes:
        """In the format of safetensors, the entries in its metadata; equal tapes to equal bytes."""
        tensors = {
            f"{n}.{index}.{place}": value
            for n, group in enumerate(self.groups)
            for index, entry in enumerate(group)
            for place, value in entry.values.items()
        }
        about = {
            "format": FORMAT,
            "key": asdict(self.key),
            "groups": [[[e.op, e.dtype, e.shape] for e in group] for group in self.groups],
            "sizes": self.sizes,
            "starts": self.starts,
            "whole": self.whole,
        }
        return safetensors.torch.save(tensors, {"tape": json.dumps(about)})

    @classmethod
    def from_bytes(cls, data: bytes, key: Key) -> "Tape":
        """Raises TapeUnusable for what is no tape, or one of another key."""
        try:
            about = json.loads(_metadata(data)["tape"])
            if about["format"] != FORMAT:
                raise TapeUnusable(f"expected a tape of format {FORMAT}, got {about['format']}")
            _check(Key(**about["key"]), key)
            groups = tuple(
                tuple(Entry(op, dtype, tuple(shape)) for op, dtype, shape in group)
                for group in about["groups"]
            )
            for name, value in safetensors.torch.load(data).items():
                n, index, place = map(int, name.split("."))
                groups[n][index].values[place] = value
            sizes = tuple(map(int, about["sizes"]))
            starts = tuple(tuple(map(int, start)) for start in about["starts"])
            return cls(key, groups, sizes, starts, bool(about["whole"]))
        except (
            safetensors.SafetensorError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:
            raise TapeUnusable(f"expected a tape, got {len(data)} other bytes: {error}") from error


def digest(data: bytes) -> str:
    """Short, for names: what authenticates is the job's secret."""
    return hashlib.sha256(data).hexdigest()[:16]


def is_kept(output: Tensor) -> bool:
    """Whether a tape holds the values of such an output, and not only that there was one."""
    if output.is_sparse:
        return False
    return output.dtype in _INTEGERS or (
        output.dtype in _FLOATS and output.nbytes <= MAX_FLOAT_BYTES
    )


def crosses(ranks: Sequence[int], placement: Sequence[str], unit: str) -> bool:
    """Whether collectives among `ranks` leave what is replaced as one, `unit`: worker or machine.

    `placement`: machine of each rank.
    """
    return unit == "worker" or len({placement[rank] for rank in ranks}) > 1


def _metadata(data: bytes) -> Mapping[str, Any]:
    length = int.from_bytes(data[:8], "little")
    metadata: Mapping[str, Any] = json.loads(data[8 : 8 + length])["__metadata__"]
    return metadata


def _check(got: Key, expected: Key) -> None:
    for what in ("script", "layout", "role_class"):
        if getattr(got, what) != getattr(expected, what):
            raise TapeUnusable(
                f"expected a tape of {what.replace('_', ' ')} {getattr(expected, what)}, got one "
                f"of {getattr(got, what)}"
            )
