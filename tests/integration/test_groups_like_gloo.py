"""Every collective, reduction and dtype of CPU tensors on our groups, beside gloo on their ranks.

One set of four processes goes through a table: what gloo computes, our groups compute too, and for
dtypes that gloo does not know, what it computes in one it does.
"""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.integration.cluster import Node, in_ranks
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.distributed_c10d import GroupName, _coalescing_manager

from trainmover.runtime.collectives import COMBINE, reduces
from trainmover.runtime.groups import LinkGroup

pytestmark = pytest.mark.concurrent
RANKS = 4
Op = dist.ReduceOp


def gloo(node: Node) -> ProcessGroup:
    """A group of all ranks beside ours, made past `dist.new_group`: that would make one of ours."""
    store = FileStore(str(node.directory / "gloo"), RANKS)
    backend = dist.ProcessGroupGloo(store, node.rank, RANKS, timedelta(seconds=20))
    group = ProcessGroup(store, node.rank, RANKS)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    name = GroupName("beside")
    group._set_group_name(name)
    group._set_group_desc("beside")
    distributed_c10d._register_pg_in_world(
        group, "gloo", store, name, "cpu:gloo", {rank: rank for rank in range(RANKS)}
    )
    return group


# ---- the table: each takes own values of shape (8, 6) or (0, 6), gives what it has received


def all_reduce(x: Tensor, group: ProcessGroup, op: Any) -> list[Tensor]:
    dist.all_reduce(x, op=op, group=group)
    return [x]


def all_reduce_later(x: Tensor, group: ProcessGroup, op: Any) -> list[Tensor]:
    work = dist.all_reduce(x, op=op, group=group, async_op=True)
    assert work is not None
    assert work.get_future().then(lambda done: done.value()[0]).wait() is not None
    return [x]


def reduce(x: Tensor, group: ProcessGroup, op: Any) -> list[Tensor]:
    dist.reduce(x, group_dst=2, op=op, group=group)
    return [x] if group.rank() == 2 else []


def reduce_scatter(x: Tensor, group: ProcessGroup, op: Any) -> list[Tensor]:
    out = torch.empty_like(x[: len(x) // RANKS])
    dist.reduce_scatter(out, list(x.tensor_split(RANKS)), op=op, group=group)
    return [out]


def reduce_scatter_single(x: Tensor, group: ProcessGroup, op: Any) -> list[Tensor]:
    out = x.new_empty((len(x) // RANKS, x.shape[1]))
    dist.reduce_scatter_single(out, x.contiguous(), op=op, group=group)
    return [out]


def all_reduce_coalesced(x: Tensor, group: ProcessGroup, op: Any) -> list[Tensor]:
    both = [x, x.roll(1, 0)]
    with _coalescing_manager(group):
        for each in both:
            dist.all_reduce(each, op=op, group=group)
    return both


REDUCTIONS = (
    all_reduce,
    all_reduce_later,
    all_reduce_coalesced,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
)


def broadcast(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    dist.broadcast(x, group_src=1, group=group)
    return [x]


def all_gather(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    outs = [torch.empty_like(x) for _ in range(RANKS)]
    dist.all_gather(outs, x, group=group)
    return outs


def all_gather_single(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    out = x.new_empty((len(x) * RANKS, x.shape[1]))
    dist.all_gather_single(out, x.contiguous(), group=group)
    return [out]


def gather(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    outs = [torch.empty_like(x) for _ in range(RANKS)] if group.rank() == 3 else None
    dist.gather(x, outs, group_dst=3, group=group)
    return outs or []


def scatter(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    out = torch.empty_like(x)
    sent = [x.roll(shift, 0) for shift in range(RANKS)] if group.rank() == 1 else None
    dist.scatter(out, sent, group_src=1, group=group)
    return [out]


def all_to_all(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    outs = [torch.empty_like(piece) for piece in x.tensor_split(RANKS)]
    dist.all_to_all(outs, [piece.contiguous() for piece in x.tensor_split(RANKS)], group=group)
    return outs


def all_to_all_uneven(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Rank r gets r rows of each: rank 0 none, and 2 of 8 rows stay where they are."""
    sent = x[:6].contiguous() if len(x) else x
    splits = [0, 1, 2, 3] if len(x) else [0] * RANKS
    mine = [splits[group.rank()]] * RANKS
    out = x.new_empty((sum(mine), x.shape[1]))
    dist.all_to_all_single(out, sent, mine, splits, group=group)
    return [out]


def send_around(x: Tensor, group: ProcessGroup) -> list[Tensor]:
    following, preceding = (group.rank() + 1) % RANKS, (group.rank() - 1) % RANKS
    got = torch.empty_like(x)
    operations = [
        dist.P2POp(dist.irecv, got, group=group, group_peer=preceding, tag=7),
        dist.P2POp(dist.isend, x.contiguous(), group=group, group_peer=following, tag=7),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [got]


MOVES = (
    broadcast,
    all_gather,
    all_gather_single,
    gather,
    scatter,
    all_to_all,
    all_to_all_uneven,
    send_around,
)
DTYPES = tuple(
    getattr(torch, name)
    for name in [
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint64",
        "uint32",
        "uint16",
        "uint8",
        "bool",
        "complex128",
        "complex64",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
    ]
)
FLOAT8 = [dtype for dtype in DTYPES if dtype.itemsize == 1 and dtype.is_floating_point]
GLOO_REDUCES = {
    torch.int16: torch.int64,
    torch.bool: torch.uint8,
    torch.uint16: torch.int64,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    **dict.fromkeys(FLOAT8, torch.float32),
}
"""What gloo has no reductions for -> what holds the same values there."""
TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-5}


def values(rank: int, dtype: torch.dtype, rows: int) -> Tensor:
    """Of any size where a tolerance is allowed, else small integers that no reduction rounds."""
    generator = torch.Generator().manual_seed(rank)
    if dtype in TOLERANCE:
        return torch.randn(rows, 6, generator=generator).to(dtype)
    low, high = (1, 3) if dtype in FLOAT8 else (0, 4)
    return torch.randint(low, high, (rows, 6), generator=generator).to(torch.float32).to(dtype)


def as_it_is(x: Tensor) -> Tensor:
    return x.clone()


def transposed(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


LAYOUTS = {8: (as_it_is, transposed), 0: (as_it_is,)}
"""By the number of rows."""
LARGE = {8 * 1024: (as_it_is,)}


def table(node: Node) -> int:
    """Returns how many cells were compared."""
    ours, theirs = dist.group.WORLD, gloo(node)
    assert isinstance(ours, LinkGroup)
    compared = 0
    for dtype in DTYPES:
        cases = LAYOUTS | (LARGE if dtype in TOLERANCE else {})
        for rows, layouts in cases.items():
            x = values(node.rank, dtype, rows)
            for move in MOVES:
                expected = move(x.clone().view(torch.uint8), theirs)
                for layout in layouts:
                    same_bytes(move, move(layout(x), ours), expected)
                    compared += 1
        for name in COMBINE:
            if not reduces(name, dtype) or (dtype.is_complex and name not in ("SUM", "AVG")):
                with pytest.raises((NotImplementedError, ValueError)):  # ours, or torch's own
                    all_reduce(values(node.rank, dtype, 8), ours, getattr(Op, name))
                continue
            for rows, layouts in cases.items():
                x = values(node.rank, dtype, rows)
                for reduction in REDUCTIONS:
                    expected = reduced(reduction, x.clone(), theirs, name)
                    for layout in layouts:
                        got = reduction(layout(x), ours, getattr(Op, name))
                        close(f"{reduction.__name__} {name} {layout.__name__}", got, expected)
                        compared += 1
    return compared


def same_bytes(move: Any, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for own, other in zip(ours, theirs, strict=True):
        assert torch.equal(own.contiguous().view(torch.uint8), other), (move, own.dtype)


def reduced(reduction: Any, x: Tensor, group: ProcessGroup, name: str) -> list[Tensor]:
    """By gloo, in a dtype that it knows, and as a sum where it knows no average."""
    known = x.to(GLOO_REDUCES.get(x.dtype, x.dtype))
    outs = reduction(known, group, Op.SUM if name == "AVG" else getattr(Op, name))
    if name == "AVG":
        whole = not (x.is_floating_point() or x.is_complex())
        outs = [out // RANKS if whole else out / RANKS for out in outs]
    return [out.to(x.dtype) for out in outs]


def close(cell: str, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for own, other in zip(ours, theirs, strict=True):
        limit = TOLERANCE.get(own.dtype, 0)
        torch.testing.assert_close(
            own, other, rtol=limit, atol=limit, msg=lambda text: f"{cell}: {text}"
        )


def test_every_collective_reduction_and_dtype_is_as_with_gloo(tmp_path: Path) -> None:
    assert min(in_ranks(table, tmp_path, RANKS, limit_s=100)) > 500
