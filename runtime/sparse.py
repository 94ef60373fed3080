"""Sums of sparse tensors, as embeddings with `sparse=True` have for gradients."""

import torch
from torch import Tensor

from trainmover.runtime import collectives
from trainmover.runtime.collectives import Ring
from trainmover.runtime.exchange import Call, writing

REDUCTIONS = ("SUM", "AVG")


def all_reduce(call: Call, ring: Ring, tensor: Tensor, reduce: str) -> None:
    """Reduce a sparse COO tensor over the group, in place and coalesced on every rank.

    Each rank gathers all indices and values, padded to the longest, and adds them in rank order.
    """
    own = tensor.detach().coalesce()
    counts = _gathered(call, ring, torch.tensor([own._nnz()]))
    most = int(counts.max())
    indices = _gathered(call, ring, _padded(own.indices().t(), most))
    values = _gathered(call, ring, _padded(own.values(), most))
    total: Tensor | None = None
    for count, index, value in zip(counts.flatten().tolist(), indices, values, strict=True):
        part = torch.sparse_coo_tensor(
            index[:count].t(), value[:count], tensor.shape, check_invariants=False
        )
        total = part if total is None else total + part
    assert total is not None
    if reduce == "AVG":
        total = total / ring.size
    with writing(call, ring.prev):
        tensor.copy_(total.coalesce())


def _gathered(call: Call, ring: Ring, piece: Tensor) -> Tensor:
    """Stacked over the ranks."""
    whole = piece.new_empty((ring.size, *piece.shape))
    rows = list(whole.view(ring.size, -1))
    collectives.all_gather(call, ring, piece.contiguous().view(-1), rows)
    return whole


def _padded(rows: Tensor, count: int) -> Tensor:
    padded = rows.new_zeros((count, *rows.shape[1:]))
    padded[: len(rows)] = rows
    return padded
