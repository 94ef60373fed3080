"""What a collective is given, checked at the call: before any rank waits for another in vain.

Each raises ValueError.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from trainmover.runtime.wire import Op


def member(op: Op, rank: int, size: int) -> int:
    """`rank`, if it is one of the group."""
    if not 0 <= rank < size:
        raise ValueError(f"expected a group rank below {size} for {op.name}, got {rank}")
    return rank


def one_each(
    op: Op, tensors: Sequence[Tensor], size: int, like: Tensor | None = None
) -> Sequence[Tensor]:
    """`tensors`, if there is one for each rank, all of the dtype and size of `like`."""
    if len(tensors) != size:
        raise ValueError(f"expected {size} tensors for {op.name}, one a rank, got {len(tensors)}")
    if like is not None:
        for tensor in tensors:
            _alike(op, tensor, like, like.numel())
    return tensors


def pieces(op: Op, whole: Tensor, size: int, like: Tensor) -> Sequence[Tensor]:
    """The equal parts of `whole`, flat: one for each rank, as large as `like`."""
    _alike(op, whole, like, like.numel() * size)
    return whole.reshape(-1).tensor_split(size)


def contiguous(op: Op, output: Tensor) -> Tensor:
    """`output`, if its parts can be written in place."""
    if not output.is_contiguous():
        raise ValueError(
            f"expected a contiguous output for {op.name} (torch's own rule), got strides "
            f"{output.stride()}: call contiguous() first"
        )
    return output


def rows(op: Op, tensor: Tensor, splits: Sequence[int], size: int) -> Sequence[Tensor]:
    """`tensor` cut along its first dimension: by `splits`, or evenly where there are none."""
    count = tensor.shape[0]
    even = [count // size] * size
    given = list(splits) or even
    if len(given) != size or sum(given) != count or min(given) < 0:
        raise ValueError(
            f"expected {size} splits of {count} rows for {op.name}, got {list(splits) or even}"
        )
    return torch.split(tensor, given)


def _alike(op: Op, tensor: Tensor, like: Tensor, elements: int) -> None:
    if tensor.dtype is not like.dtype or tensor.numel() != elements:
        raise ValueError(
            f"expected a tensor of {elements} {like.dtype} for {op.name}, got one of "
            f"{tensor.numel()} {tensor.dtype}: every rank gives and takes the same"
        )
