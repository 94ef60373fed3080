"""Collectives over socket pairs, one thread per rank, against numpy."""

import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from trainmover.runtime import collectives, shm
from trainmover.runtime.collectives import Ring
from trainmover.runtime.exchange import Call, CollectiveMismatch
from trainmover.runtime.fence import Fence, Revoked
from trainmover.runtime.link import Link, LinkBroken
from trainmover.runtime.shm import Memory
from trainmover.runtime.wire import Op

SIZES = [1, 2, 3, 4]
ELEMENTS = [1, 7003]  # fewer than ranks; pieces of unequal size
LARGE = 600_007  # several frames a piece
Body = Callable[[Call, Ring, Callable[[int], Link]], object]


def shared(_: int) -> bool:
    return True


class World:
    """`size` ranks with a full mesh of socket pairs; the ring uses its part of it.

    `shares(rank)`: whether its link to the next rank has shared memory.
    """

    def __init__(self, size: int, shares: Callable[[int], bool] = lambda rank: False) -> None:
        self.size = size
        self.fence = Fence()
        self.fence.open(1)
        self.links: list[dict[int, Link]] = [{} for _ in range(size)]
        for a in range(size):
            for b in range(a + 1, size):
                ends = socket.socketpair()
                first = a if b == a + 1 else b
                memory = memories() if shares(first) else (None, None)
                self.links[a][b] = Link(ends[0], b, f"w{b}", "c", 1, self.fence, memory[0])
                self.links[b][a] = Link(ends[1], a, f"w{a}", "c", 1, self.fence, memory[1])
        self.seq = 0

    def run(self, op: Op, *bodies: Body, timeout_s: float = 10) -> list[object]:
        """Run one body on all ranks, or one per rank; results in rank order."""
        self.seq += 1
        deadline = time.monotonic() + timeout_s
        call = Call(self.fence, 1, "g", op, self.seq, deadline, timeout_s)

        def rank(r: int) -> object:
            links = self.links[r]
            ring = Ring(r, self.size, links.get((r + 1) % self.size), links.get(r - 1))
            if self.size > 1 and r == 0:
                ring = Ring(r, self.size, links[1 % self.size], links[self.size - 1])
            return bodies[r % len(bodies)](call, ring, links.__getitem__)

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(rank, range(self.size)))

    def close(self) -> None:
        for links in self.links:
            for link in links.values():
                link.close()
        self.fence.close()


def memories() -> tuple[Memory, Memory]:
    fd = shm.create()
    other = os.dup(fd)
    return Memory(fd, dialer=True), Memory(other, dialer=False)


@pytest.fixture(params=[(size, False) for size in SIZES] + [(3, True)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    size, memory = request.param
    made = World(size, lambda rank: memory)
    yield made
    made.close()


@pytest.fixture
def three() -> Iterator[World]:
    made = World(3)
    yield made
    made.close()


def values(rank: int, elements: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    whole = torch.randint(1, 4, (elements,), generator=generator)
    return whole.to(dtype)


NUMPY = {
    "SUM": np.add.reduce,
    "PRODUCT": np.multiply.reduce,
    "MAX": np.maximum.reduce,
    "MIN": np.minimum.reduce,
}


@pytest.mark.parametrize(
    ("dtype", "elements"),
    [
        (torch.float32, 1),
        (torch.float32, 7003),
        (torch.float32, LARGE),
        (torch.bfloat16, 9001),
        (torch.float16, 9001),
        (torch.float64, 2001),
        (torch.int64, 2001),
        (torch.uint8, 17001),
    ],
)
def test_all_reduce_equals_numpy(world: World, dtype: torch.dtype, elements: int) -> None:
    inputs = [values(r, elements, dtype) for r in range(world.size)]
    for reduce, by_numpy in NUMPY.items():
        expected = torch.from_numpy(by_numpy([t.double().numpy() for t in inputs]))

        def body(call: Call, ring: Ring, _: object, reduce: str = reduce) -> Tensor:
            flat = inputs[ring.rank].clone()
            collectives.all_reduce(call, ring, flat, reduce)
            return flat

        for result in world.run(Op.ALL_REDUCE, body):
            assert isinstance(result, Tensor)
            assert torch.equal(result.double(), expected)


def test_avg_divides_floats_and_truncates_integers(world: World) -> None:
    for dtype in (torch.float64, torch.int32):
        inputs = [values(r, 5000, dtype) for r in range(world.size)]
        total = torch.stack(inputs).sum(0)
        expected = total / world.size if dtype.is_floating_point else total // world.size

        def body(call: Call, ring: Ring, _: object, inputs: list[Tensor] = inputs) -> Tensor:
            flat = inputs[ring.rank].clone()
            collectives.all_reduce(call, ring, flat, "AVG")
            return flat

        for result in world.run(Op.ALL_REDUCE, body):
            assert isinstance(result, Tensor)
            assert torch.equal(result, expected.to(dtype))


def test_all_reduce_of_booleans_is_or_and_and(world: World) -> None:
    def body(call: Call, ring: Ring, _: object) -> tuple[bool, bool]:
        either = torch.tensor([ring.rank == 0, False])
        both = torch.tensor([ring.rank == 0, True])
        collectives.all_reduce(call, ring, either, "SUM")
        collectives.all_reduce(call, ring, both, "MIN")
        return bool(either[0]) and not either[1], bool(both[1])

    assert world.run(Op.ALL_REDUCE, body) == [(True, True)] * world.size


@pytest.mark.parametrize("elements", ELEMENTS)
def test_reduce_scatter_gives_each_rank_its_sum_and_keeps_the_input(
    world: World, elements: int
) -> None:
    inputs = [values(r, elements * world.size, torch.float32) for r in range(world.size)]
    total = torch.stack(inputs).sum(0).tensor_split(world.size)

    def body(call: Call, ring: Ring, _: object) -> Tensor:
        own = inputs[ring.rank].clone()
        out = torch.empty(elements)
        collectives.reduce_scatter(call, ring, list(own.tensor_split(ring.size)), out, "SUM")
        assert torch.equal(own, inputs[ring.rank])
        return out

    for rank, result in enumerate(world.run(Op.REDUCE_SCATTER, body)):
        assert isinstance(result, Tensor)
        assert torch.equal(result, total[rank])


@pytest.mark.parametrize("elements", ELEMENTS)
def test_all_gather_puts_the_pieces_in_rank_order(world: World, elements: int) -> None:
    inputs = [values(r, elements, torch.float32) for r in range(world.size)]

    def body(call: Call, ring: Ring, _: object) -> Tensor:
        outs = [torch.empty(elements) for _ in range(ring.size)]
        collectives.all_gather(call, ring, inputs[ring.rank], outs)
        return torch.cat(outs)

    for result in world.run(Op.ALL_GATHER, body):
        assert isinstance(result, Tensor)
        assert torch.equal(result, torch.cat(inputs))


@pytest.mark.parametrize("elements", ELEMENTS)
def test_broadcast_and_reduce_work_from_and_to_every_root(world: World, elements: int) -> None:
    inputs = [values(r, elements, torch.float32) for r in range(world.size)]
    for root in range(world.size):

        def spread(call: Call, ring: Ring, _: object, root: int = root) -> Tensor:
            flat = inputs[ring.rank].clone()
            collectives.broadcast(call, ring, flat, root)
            return flat

        def collect(call: Call, ring: Ring, _: object, root: int = root) -> Tensor:
            flat = inputs[ring.rank].clone()
            collectives.reduce_to(call, ring, flat, root, "SUM")
            return flat

        for result in world.run(Op.BROADCAST, spread):
            assert isinstance(result, Tensor)
            assert torch.equal(result, inputs[root])
        for rank, result in enumerate(world.run(Op.REDUCE, collect)):
            assert isinstance(result, Tensor)
            expected = torch.stack(inputs).sum(0) if rank == root else inputs[rank]
            assert torch.equal(result, expected)


def test_pairwise_moves_pieces_of_different_sizes(world: World) -> None:
    def body(call: Call, ring: Ring, links: Callable[[int], Link]) -> list[Tensor | None]:
        sent = [torch.full((ring.rank + r,), 10.0 * ring.rank + r) for r in range(ring.size)]
        received: list[Tensor | None] = [torch.empty(ring.rank + r) for r in range(ring.size)]
        collectives.pairwise(call, ring, links, sent, received)
        return received

    for rank, received in enumerate(world.run(Op.ALL_TO_ALL, body)):
        assert isinstance(received, list)
        for source, piece in enumerate(received):
            assert torch.equal(piece, torch.full((rank + source,), 10.0 * source + rank))


def test_an_empty_tensor_is_no_traffic(world: World) -> None:
    def body(call: Call, ring: Ring, _: object) -> None:
        empty = torch.empty(0)
        collectives.all_reduce(call, ring, empty, "SUM")
        collectives.broadcast(call, ring, empty, 0)
        collectives.all_gather(call, ring, empty, [torch.empty(0) for _ in range(ring.size)])

    world.run(Op.ALL_REDUCE, body)


@pytest.mark.parametrize("elements", [100, 100_000])
def test_the_order_of_additions_follows_from_the_shape_alone(three: World, elements: int) -> None:
    inputs = [torch.randn(elements, generator=torch.Generator().manual_seed(r)) for r in range(3)]

    def body(call: Call, ring: Ring, _: object) -> Tensor:
        time.sleep(0.003 * ((ring.rank + call.seq) % 3))  # another rank comes last each time
        flat = inputs[ring.rank].clone()
        collectives.all_reduce(call, ring, flat, "SUM")
        return flat

    results = [r for _ in range(4) for r in three.run(Op.ALL_REDUCE, body)]
    first = results[0]
    assert isinstance(first, Tensor)
    assert all(isinstance(r, Tensor) and torch.equal(r, first) for r in results)


def by_hand(inputs: list[Tensor]) -> Tensor:
    """The sum in the order that collectives.py promises."""
    size = len(inputs)
    if inputs[0].nbytes <= collectives.SMALL_BYTES:
        return sum(inputs[1:], inputs[0])
    total = []
    for c, pieces in enumerate(zip(*(x.tensor_split(size) for x in inputs), strict=True)):
        first, *others = [pieces[(c + 1 + hop) % size] for hop in range(size)]
        total.append(sum(others, first))
    return torch.cat(total)


@pytest.mark.parametrize("elements", [900, 16_385, 70_001, 1_200_007])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_have_the_same_bits_over_sockets_and_shared_memory_whether_it_is_full_or_not(
    size: int, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [torch.randn(elements, generator=torch.Generator().manual_seed(r)) for r in range(4)]
    expected = by_hand(inputs[:size])

    def body(call: Call, ring: Ring, _: object) -> tuple[Tensor, Tensor]:
        flat, part = inputs[ring.rank].clone(), torch.empty(elements)
        collectives.all_reduce(call, ring, flat, "SUM")
        pieces = [inputs[ring.rank].clone() for _ in range(size)]
        collectives.reduce_scatter(call, ring, pieces, part, "SUM")
        assert all(torch.equal(piece, inputs[ring.rank]) for piece in pieces)
        return flat, part

    for slots, shares in ((0, None), (12, shared), (1, shared), (12, lambda rank: rank % 2 == 0)):
        monkeypatch.setattr(shm, "SLOTS", slots)
        made = World(size, shares) if shares else World(size)
        for rank, result in enumerate(made.run(Op.ALL_REDUCE, body)):
            assert isinstance(result, tuple)
            flat, part = result
            assert torch.equal(flat, expected)
            others = [inputs[(rank + 1 + hop) % size] for hop in range(size)]
            assert torch.equal(part, sum(others[1:], others[0]))
        made.close()


def test_a_mismatch_names_group_number_operations_and_sizes_and_moves_nothing(
    three: World,
) -> None:
    big, other = torch.zeros(300), torch.ones(200)

    def reduces(call: Call, ring: Ring, _: object) -> str:
        with pytest.raises((CollectiveMismatch, TimeoutError)) as caught:
            collectives.all_reduce(call, ring, big if ring.rank == 1 else other, "SUM")
        return str(caught.value)

    texts = three.run(Op.ALL_REDUCE, reduces, timeout_s=0.2)
    expected = "group g: expected ALL_REDUCE number 1 .* of 1200 bytes, but rank 0 is in ALL_REDUCE"
    assert any(re.search(expected, str(text)) for text in texts)
    assert not big.any()


def test_a_peer_that_never_comes_is_named(three: World) -> None:
    def late(call: Call, ring: Ring, _: object) -> None:
        if ring.rank != 2:
            with pytest.raises(TimeoutError, match="still waiting for rank"):
                collectives.all_reduce(call, ring, torch.ones(10), "SUM")

    three.run(Op.ALL_REDUCE, late, timeout_s=0.05)


def test_a_closed_peer_breaks_the_ring_of_its_neighbours_only(three: World) -> None:
    def body(call: Call, ring: Ring, _: object) -> str:
        if ring.rank == 2:
            for link in three.links[2].values():
                link.close()
            return "closed"
        try:
            collectives.all_reduce(call, ring, torch.ones(100_000), "SUM")
        except (LinkBroken, Revoked) as error:
            three.fence.revoke(1, "a link broke")
            return type(error).__name__
        return "finished"

    assert set(three.run(Op.ALL_REDUCE, body)) <= {"closed", "LinkBroken", "Revoked"}
