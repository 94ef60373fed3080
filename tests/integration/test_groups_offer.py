"""What torch.distributed offers around its collectives, on our groups in four processes."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tests.integration.cluster import Node, in_ranks
from torch import Tensor, nn
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import (
    _coalescing_manager,
    _find_pg_by_ranks_and_tag,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from trainmover.runtime.aborts import StepAborted
from trainmover.runtime.groups import LinkGroup

pytestmark = pytest.mark.concurrent
RANKS = 4


def objects(node: Node) -> None:
    rank = node.rank
    mine = {"rank": rank, "tensor": torch.full((rank,), rank)}
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, mine)
    assert [each["rank"] for each in every] == list(range(RANKS))
    gathered: list[Any] | None = [None] * RANKS if rank == 1 else None
    dist.gather_object(mine, gathered, dst=1)
    assert gathered is None or [len(each["tensor"]) for each in gathered] == list(range(RANKS))
    told: list[Any] = [mine, "more"] if rank == 3 else [None, None]
    dist.broadcast_object_list(told, src=3)
    assert told[0]["rank"] == 3
    assert told[1] == "more"
    got: list[Any] = [None]
    dist.scatter_object_list(got, [f"for {r}" for r in range(RANKS)] if rank == 2 else None, src=2)
    assert got == [f"for {rank}"]
    if rank == 0:
        dist.send_object_list([mine, [1, 2]], dst=2)
    if rank == 2:
        dist.recv_object_list(pair := [None, None], src=0)
        assert pair[1] == [1, 2]


def subgroups(node: Node) -> None:
    rank = node.rank
    backwards = dist.new_group([3, 1, 0], sort_ranks=False)
    if rank != 2:
        assert dist.get_group_rank(backwards, rank) == [3, 1, 0].index(rank)
        assert gathered(rank, backwards) == [3, 1, 0]
    sorted_one = dist.new_group([3, 1, 0])
    assert rank == 2 or gathered(rank, sorted_one) == [0, 1, 3]
    alone = dist.new_group([rank], use_local_synchronization=True)
    assert gathered(rank, alone) == [rank]
    halves, all_halves = dist.new_subgroups(2)  # type: ignore[no-untyped-call]
    assert gathered(rank, halves) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert len(all_halves) == 2
    again = dist.new_group([0, 1, 3])
    assert rank == 2 or gathered(rank, again) == [0, 1, 3]
    if rank != 2:
        assert _find_pg_by_ranks_and_tag("", [0, 1, 3]) in (sorted_one, backwards)
        dist.destroy_process_group(again)
    dist.barrier()


def gathered(rank: int, group: dist.ProcessGroup | None) -> list[int]:
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, rank, group=group)
    return every


def other_backends(node: Node) -> None:
    """A script's group for CPU tensors, by whatever name, communicates over our links."""
    for name in ("gloo", "cpu:gloo,cuda:nccl", "trainmover"):
        group = dist.new_group(backend=name)
        assert isinstance(group, LinkGroup)
        assert dist.get_backend(group) == name
        assert group.engine.channel in node.mesh.channels
        assert gathered(node.rank, group) == list(range(RANKS))
        dist.monitored_barrier(group)


def in_flight(node: Node) -> None:
    """Each group is a FIFO; groups do not wait for each other."""
    rank = node.rank
    groups = [dist.new_group() for _ in range(4)]
    values = [torch.full((20_000,), float(rank)) for _ in groups]
    works = []
    for turn in range(6):
        for value, group in zip(values, groups, strict=True):
            if turn % 2:
                works.append(
                    dist.broadcast(value, group_src=turn % RANKS, group=group, async_op=True)
                )
            else:
                works.append(dist.all_reduce(value, group=group, async_op=True))
    first_on_some = dist.barrier(groups[rank % 2], async_op=True)  # not the same order everywhere
    second = dist.barrier(groups[1 - rank % 2], async_op=True)
    for work in (*works, second, first_on_some):
        assert work is not None
        work.wait()
        assert work.is_completed()
    assert all(value.eq(6.0 * 16).all() for value in values)


def coalesced(node: Node) -> None:
    rank = node.rank
    device = torch.device("cpu")
    token, got = torch.full((3,), float(rank)), torch.zeros(3)
    with _coalescing_manager(device=device, async_ops=True) as block:
        dist.isend(token, (rank + 1) % RANKS)
        dist.irecv(got, (rank - 1) % RANKS)
    block.wait()
    assert got.eq((rank - 1) % RANKS).all()
    sums = [torch.ones(4, 2), torch.ones(3)]
    with _coalescing_manager(device=device):
        for value in sums:
            dist.all_reduce(value)
    assert all(value.eq(RANKS).all() for value in sums)
    wholes = [torch.empty(RANKS * 2), torch.empty(RANKS)]
    with _coalescing_manager(async_ops=True) as block:
        dist.all_gather_single(wholes[0], torch.full((2,), float(rank)))
        dist.all_gather_single(wholes[1], torch.full((1,), float(rank)))
    block.wait()
    assert wholes[1].tolist() == list(range(RANKS))


def cut_inside_a_coalesced_block(node: Node) -> None:
    dist.barrier()

    def cut() -> None:
        with _coalescing_manager():
            dist.all_reduce(torch.ones(2))
            node.fence.revoke(1, "a drill")
            dist.send(torch.ones(1), (node.rank + 1) % RANKS)

    with pytest.raises(StepAborted):
        cut()
    node.switch(2, node.assignment, {})
    value = torch.ones(2)
    dist.all_reduce(value)
    assert value.tolist() == [RANKS, RANKS]


def functional_collectives(node: Node) -> None:
    rank, world = node.rank, dist.group.WORLD
    assert world is not None
    own = torch.full((RANKS, 2), float(rank), requires_grad=True)
    assert functional.all_reduce(own, "avg", world).eq(1.5).all()
    assert functional.all_gather_single(own, 0, world).shape == (RANKS * RANKS, 2)
    assert functional.reduce_scatter_single(own, "sum", 0, world).eq(6).all()
    assert functional.broadcast(own, 2, world).eq(2).all()
    mixed = functional.all_to_all_single(own.detach(), None, None, world)
    assert mixed[:, 0].tolist() == list(range(RANKS))
    both = functional.all_reduce_coalesced([own, own + 1], "max", world)
    assert both[1].eq(RANKS).all()
    pieces = functional.all_gather_single_coalesced([own[:1], own[:1] + 1], world)
    assert pieces[0][:, 0].tolist() == list(range(RANKS))
    parts = functional.reduce_scatter_single_coalesced([own, own], "sum", [0, 0], world)
    assert parts[1].eq(6).all()
    doubled = functional.all_reduce(own * 2, "sum", world)
    doubled.sum().backward()
    assert own.grad is not None


def meshes(node: Node) -> None:
    rank = node.rank
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert gathered(rank, mesh.get_group("dp")) == [rank % 2, rank % 2 + 2]
    assert gathered(rank, mesh.get_group("tp")) == [rank // 2 * 2, rank // 2 * 2 + 1]
    flat = mesh["dp", "tp"]._flatten("all")
    assert gathered(rank, flat.get_group()) == list(range(RANKS))
    again = DeviceMesh.from_group(
        [mesh.get_group("dp"), mesh.get_group("tp")],
        "cpu",
        mesh=torch.arange(RANKS).view(2, 2),
        mesh_dim_names=("a", "b"),
    )
    assert again["b"].get_local_rank() == rank % 2
    one = DeviceMesh.from_group(dist.new_group(), "cpu")
    whole = torch.arange(24.0).view(8, 3)
    sharded = distribute_tensor(whole, one, [Shard(0)])
    assert torch.equal(sharded.full_tensor(), whole)
    assert sharded.redistribute(placements=[Shard(1)]).to_local().shape[1] <= 1
    both_ways = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    summed = both_ways.sum(0)
    assert isinstance(summed, DTensor)
    assert torch.equal(summed.full_tensor(), whole.sum(0))


def sparse_gradients(node: Node) -> None:
    embedding = nn.Embedding(10, 3, sparse=True)
    ddp = DistributedDataParallel(embedding)
    ddp(torch.tensor([node.rank, node.rank + 1, 9])).sum().backward()
    assert embedding.weight.grad is not None
    shares = embedding.weight.grad.to_dense()[:, 0] * RANKS
    assert shares.tolist() == [1, 2, 2, 2, 1, 0, 0, 0, 0, 4]
    own = (torch.arange(5.0).eq(node.rank) * (node.rank % 2) * 2.0).to_sparse()
    dist.all_reduce(own, op=dist.ReduceOp.AVG)
    assert own.to_dense().tolist() == [0, 0.5, 0, 0.5, 0]


def views(node: Node) -> None:
    """Values that their memory does not hold as they are."""
    negative = torch.full((4,), complex(1, node.rank)).conj().imag  # a bit says minus
    dist.broadcast(negative, src=3)
    assert negative.eq(-3).all()
    strided = torch.zeros(4, 3)[:, ::2]
    dist.broadcast(strided if node.rank else torch.ones(4, 2), src=0)
    assert strided.eq(1).all() or not node.rank
    images = torch.full((2, 3, 4, 4), float(node.rank)).to(memory_format=torch.channels_last)
    dist.all_reduce(images)
    assert images.eq(6).all()
    dist.all_reduce(torch.tensor(1.0))
    dist.broadcast(torch.empty(0), src=1)


def refusals(node: Node) -> None:
    for call, said in REFUSED:
        with pytest.raises((NotImplementedError, ValueError, RuntimeError), match=said):
            call()
    dist.barrier()


REFUSED: tuple[tuple[Callable[[], object], str], ...] = (
    (
        lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BXOR),
        "expected a dtype that torch reduces by BXOR on CPU, got torch.float32: cast",
    ),
    (
        lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e5m2)),
        "reduces by SUM on CPU, got torch.float8_e5m2: cast",
    ),
    (
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), op=dist.ReduceOp.AVG),
        "reduces by AVG on CPU, got torch.bool: cast",
    ),
    (
        lambda: dist.all_reduce(torch.ones(2), op=_make_nccl_premul_sum(2.0)),
        "got PREMUL_SUM: .*multiply the tensor, then SUM",
    ),
    (
        lambda: dist.all_reduce(torch.ones(2).to_sparse(), op=dist.ReduceOp.MAX),
        "expected one of SUM, AVG for a sparse tensor, got MAX: densify",
    ),
    (lambda: dist.all_gather([torch.ones(3)] * RANKS, torch.ones(2)), "of 2 torch.float32.*of 3"),
    (lambda: dist.all_gather([torch.ones(2)] * 3, torch.ones(2)), "4 tensors .* one a rank, got 3"),
    (lambda: dist.all_gather_single(torch.ones(8), torch.ones(2).int()), "of 8 torch.int32"),
    (lambda: dist.reduce_scatter(torch.ones(2), [torch.ones(2)] * 5), "4 tensors .* got 5"),
    (lambda: dist.reduce_scatter_single(torch.ones(2), torch.ones(7)), "of 8 .*got one of 7"),
    (lambda: dist.all_to_all([torch.ones(2)] * 4, [torch.ones(2)] * 3), "4 tensors .* got 3"),
    (lambda: dist.all_to_all_single(torch.ones(7), torch.ones(7)), "4 splits of 7 rows"),
    (lambda: dist.broadcast(torch.ones(2), src=9), "expected a group rank below 4 for BROADCAST"),
    (lambda: dist.send(torch.ones(2), dst=9), "expected a group rank below 4 for SEND, got 9"),
    (lambda: dist.broadcast(torch.ones(2).to_sparse(), src=0), "expected dense CPU tensors"),
    (lambda: dist.all_reduce(torch.ones(2, device="meta")), "expected dense CPU tensors.*meta"),
    (lambda: dist.recv(torch.ones(2)), "expected recv.. with a source rank, got any source"),
    (lambda: dist.split_group(split_ranks=[[0, 1], [2, 3]]), "No device associated"),
)


def barrier_without_two(node: Node) -> tuple[str, float]:
    dist.monitored_barrier(timeout=timedelta(seconds=5))
    began = time.monotonic()
    if node.rank in (1, 2):
        return "", 0
    with pytest.raises(RuntimeError) as caught:
        dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=True)
    return str(caught.value), time.monotonic() - began


def comm_hooks(node: Node) -> None:
    """What a hook makes of its futures is the average over the ranks, as far as it is exact."""
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(node.rank))
    plain, *hooked = (
        gradient(x, register)
        for register in (
            lambda ddp: None,
            lambda ddp: ddp.register_comm_hook(None, default_hooks.allreduce_hook),
            lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
            lambda ddp: ddp.register_comm_hook(
                powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2),
                powerSGD_hook.powerSGD_hook,
            ),
        )
    )
    assert torch.equal(hooked[0], plain)
    for each in hooked:
        torch.testing.assert_close(each, plain, rtol=2e-2, atol=2e-2)


def gradient(x: Tensor, register: Callable[[DistributedDataParallel], None]) -> Tensor:
    torch.manual_seed(0)
    linear = nn.Linear(16, 8)
    ddp = DistributedDataParallel(linear)
    register(ddp)
    ddp(x).square().mean().backward()
    assert linear.weight.grad is not None
    return linear.weight.grad


def errors_inside_a_backward(node: Node) -> None:
    """They reach the caller of backward(), not the process."""
    ddp = DistributedDataParallel(
        nn.Linear(4, 4), process_group=dist.new_group(timeout=timedelta(seconds=1.5))
    )
    if node.rank != 3:
        loss = ddp(torch.ones(2, 4)).sum()
        with pytest.raises(RuntimeError, match=r"expected ALL_REDUCE number \d+ within 1.5 s"):
            loss.backward()


def own_timeouts(node: Node) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if node.rank != 3:
        with pytest.raises(TimeoutError, match=r"expected ALL_REDUCE number 1 within 1.0 s"):
            dist.all_reduce(torch.ones(2), group=group)
    if node.rank == 0:
        with pytest.raises(TimeoutError, match=r"within 0.1 s, still waiting for rank 3"):
            dist.barrier(timeout=timedelta(seconds=0.1))
    if node.rank == 1:
        with pytest.raises(TimeoutError, match=r"expected GATHER .* but rank 0 has not come to it"):
            dist.gather(torch.ones(1), dst=0, group=group)


OFFERS = (
    objects,
    subgroups,
    other_backends,
    in_flight,
    coalesced,
    cut_inside_a_coalesced_block,
    functional_collectives,
    meshes,
    sparse_gradients,
    views,
    comm_hooks,
    errors_inside_a_backward,
    refusals,
    own_timeouts,
)


@pytest.mark.parametrize("body", OFFERS, ids=lambda body: body.__name__)
def test_groups_offer(body: Callable[[Node], None], tmp_path: Path) -> None:
    assert in_ranks(body, tmp_path, RANKS) == [None] * RANKS


def test_a_monitored_barrier_names_every_rank_that_does_not_come(tmp_path: Path) -> None:
    said, _, _, heard = in_ranks(barrier_without_two, tmp_path, RANKS)
    assert said[0].startswith("Ranks 1, 2 failed to pass monitoredBarrier in 1000 ms")
    assert heard[0].startswith("Rank 3 successfully reached monitoredBarrier, but received errors")
    assert said[1] < 5
