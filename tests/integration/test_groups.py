"""Process groups over links in real processes: training, aborts, kills and switches."""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.integration.cluster import LIMIT_S, Node, cluster
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainmover.runtime import exchange
from trainmover.runtime.aborts import StepAborted
from trainmover.runtime.admission import Issued, Mode
from trainmover.runtime.mesh import Counters
from trainmover.runtime.topology import Assignment, control_edges, peers, ring_edges

pytestmark = pytest.mark.concurrent


def sample(rank: int, elements: int) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank))


def every_collective(node: Node, _: Pipe) -> int:
    rank, size = node.rank, node.size
    summed = torch.ones(4, 6).t()  # not contiguous
    dist.all_reduce(summed)
    assert summed.eq(size).all()
    work = dist.all_reduce(torch.full((100_000,), float(rank)), op=dist.ReduceOp.MAX, async_op=True)
    assert work is not None
    work.wait()
    assert work.get_future().wait()[0].eq(size - 1).all()
    whole = torch.empty(size * 2)
    dist.all_gather_single(whole, torch.full((2,), float(rank)))
    assert whole.tolist() == [float(r) for r in range(size) for _ in range(2)]
    part = torch.empty(2)
    dist.reduce_scatter_single(part, torch.arange(size * 2.0), op=dist.ReduceOp.AVG)
    assert part.tolist() == [rank * 2.0, rank * 2.0 + 1]
    root = torch.full((3,), float(rank))
    dist.reduce(root, dst=1)
    assert root[0] == (sum(range(size)) if rank == 1 else rank)
    gathered = [torch.empty(1) for _ in range(size)] if rank == 0 else None
    dist.gather(torch.full((1,), float(rank)), gathered, dst=0)
    assert gathered is None or [t.item() for t in gathered] == list(range(size))
    scattered = torch.empty(1)
    dist.scatter(scattered, [torch.full((1,), r * 2.0) for r in range(size)] if rank == 0 else None)
    assert scattered.item() == rank * 2
    mixed = torch.empty(size)
    dist.all_to_all_single(mixed, torch.arange(float(size)) + 10 * rank)
    assert mixed.tolist() == [10.0 * r + rank for r in range(size)]
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    with torch.inference_mode():
        loss = torch.ones(9000) * rank
        dist.all_reduce(loss)
        assert loss[0] == sum(range(size))
    both_ways(rank, size)
    wait_in_a_circle(rank, dist.new_group(list(range(size))))
    pair = dist.new_group([0, 1])
    if rank < 2:
        small = torch.ones(1)
        dist.all_reduce(small, group=pair)
        assert small.item() == 2
    dist.barrier()
    return node.mesh.pairs_opened


def both_ways(rank: int, size: int) -> None:
    """Large sends in both directions at once: more than any socket buffer holds."""
    following, preceding = (rank + 1) % size, (rank - 1) % size
    sent, received = torch.full((500_000,), float(rank)), torch.empty(500_000)
    operations = [
        dist.P2POp(dist.isend, sent, following),
        dist.P2POp(dist.irecv, received, preceding),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert received.eq(preceding).all()


def wait_in_a_circle(rank: int, group: dist.ProcessGroup) -> None:
    """A receive posted early must not keep the other direct pairs of its rank from opening."""
    token = torch.zeros(1)
    early = dist.irecv(token, 0, group=group) if rank == 1 else None
    if rank == 1:
        dist.send(torch.ones(1), 2, group=group)
    else:
        dist.recv(token, 2 if rank == 0 else 1, group=group)
        dist.send(token, 1 if rank == 0 else 0, group=group)
    if early is not None:
        early.wait()
    assert token.item() == 1


def test_every_collective_of_torch_works_between_processes(tmp_path: Path) -> None:
    with cluster(tmp_path, 3, every_collective) as made:
        made.gather()


def reductions(node: Node, _: Pipe) -> list[bytes]:
    results = []
    for elements in (1000, 300_000):
        for dtype in (torch.float32, torch.bfloat16):
            flat = sample(node.rank, elements).to(dtype)
            dist.all_reduce(flat)
            results.append(flat.view(torch.uint8).numpy().tobytes())
    return results


def test_sums_are_the_same_bits_over_unix_sockets_and_tcp(tmp_path: Path) -> None:
    answers: list[list[bytes]] = []
    for scheme in ("unix:", "tcp:"):
        with cluster(tmp_path, 3, reductions, scheme) as made:
            answers += made.gather()
    assert all(answer == answers[0] for answer in answers)


def stopped_peer(node: Node, pipe: Pipe) -> object:
    flat = torch.full((2_000_000,), 1.0)
    counts = torch.full((1000,), 7, dtype=torch.int64)
    dist.barrier()
    pipe.send("ready")
    if node.rank == 2:
        pipe.recv()  # stopped here, before it takes part
        dist.all_reduce(flat, async_op=True)
        return None
    first = dist.all_reduce(flat, async_op=True)
    second = dist.all_reduce(counts, async_op=True)
    assert first is not None
    assert second is not None
    pipe.recv()
    began = time.monotonic()
    assert node.fence.revoke(1, "rank 2 hangs")
    first.wait()
    second.wait()
    took_s = time.monotonic() - began
    assert not counts.any()
    flat.fill_(float("nan"))  # the next step reuses the buffer
    pipe.send(took_s)
    pipe.recv()
    return bool(flat.isnan().all()), len(node.poisoned)


def test_an_abort_returns_at_once_and_a_peer_that_wakes_up_writes_nothing(tmp_path: Path) -> None:
    with cluster(tmp_path, 3, stopped_peer) as made:
        assert made.gather() == ["ready"] * 3
        pid = made.processes["w2"].pid
        os.kill(pid, signal.SIGSTOP)
        made.tell("go", "w2")
        time.sleep(0.2)  # the others are in the middle of their collective
        made.tell("revoke", "w0", "w1")
        assert max(made.gather("w0", "w1")) < 0.5
        os.kill(pid, signal.SIGCONT)
        made.gather("w2")
        time.sleep(0.2)  # what it sent has arrived
        made.tell("look", "w0", "w1")
        assert made.gather("w0", "w1") == [(True, 2)] * 2


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(10, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 32),
        nn.ReLU(),
        nn.Linear(32, 1),
    )


def train(net: nn.Module, steps: range, rank: int) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in steps:
        optimizer.zero_grad()
        net(sample(1000 + step * 10 + rank, 80).view(8, 10)).square().mean().backward()
        optimizer.step()


def parameters(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def reference(steps: int, size: int) -> Tensor:
    """The same training in one process: gradients averaged over the ranks' batches."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(size):
            batch = sample(1000 + step * 10 + rank, 80).view(8, 10)
            (net(batch).square().mean() / size).backward()
        optimizer.step()
    return parameters(net)


def ddp_with_an_abort(node: Node, pipe: Pipe) -> Tensor:
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.002)
    train(ddp, range(3), node.rank)
    before = [p.detach().clone() for p in ddp.parameters()]
    hook = ddp.module[3].weight.register_hook(
        lambda grad: (node.fence.revoke(1, "in the backward"), grad)[1]
    )
    ddp(sample(5, 80).view(8, 10)).mean().backward()
    hook.remove()
    assert node.poisoned
    with pytest.raises(StepAborted, match="in the backward"):
        dist.all_reduce(torch.ones(1))
    pipe.send("aborted")
    node.switch(*pipe.recv())
    assert all(torch.equal(p, old) for p, old in zip(ddp.parameters(), before, strict=True))
    train(ddp, range(3, 6), node.rank)
    return parameters(ddp)


def test_ddp_equals_one_process_also_after_an_abort_inside_a_backward(tmp_path: Path) -> None:
    with cluster(tmp_path, 3, ddp_with_an_abort) as made:
        assert made.gather() == ["aborted"] * 3
        made.tell((2, made.assignment, made.addresses))
        results = made.gather()
    assert all(torch.equal(result, results[0]) for result in results)
    assert (results[0] - reference(6, 3)).abs().max() < 1e-6


def killed_inside_a_frame(node: Node, pipe: Pipe) -> object:
    flat, inodes = sample(node.rank, 300_000), {}
    if node.worker == "w1":
        exchange.frame_hook = kill_after_10_kb
    if node.worker != "x1":
        work = dist.all_reduce(flat.clone(), async_op=True)
        assert work is not None
        pipe.recv()
        node.fence.revoke(1, "w1 was lost")
        work.wait()
        inodes = node.inodes()
        pipe.send([facts[:2] for facts in node.broken])
        node.counters = node.switch(*pipe.recv())
    dist.all_reduce(flat)
    both_ways(node.rank, node.size)
    kept = sorted(place for place, inode in node.inodes().items() if inodes.get(place) == inode)
    return flat, node.counters, kept


def kill_after_10_kb(channel: str, sent: int) -> None:
    if sent > 10_000:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_killed_inside_a_frame_is_replaced_and_no_other_link_is_touched(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, 5, killed_inside_a_frame) as made:
        made.processes["w1"].join(LIMIT_S)
        assert made.processes["w1"].exitcode == -signal.SIGKILL
        stayers = ("w0", "w2", "w3", "w4")
        made.tell("revoke", *stayers)
        broken = made.gather(*stayers)
        assert {worker for facts in broken for _, worker in facts} <= {"w1"}
        made.assignment[1] = "x1"
        made.start("x1", 1, killed_inside_a_frame)
        made.tell((2, made.assignment, made.addresses, 1))
        results = dict(zip(made.assignment, made.gather(), strict=True))
    expected = sum(sample(rank, 300_000).double() for rank in range(5))
    flats = [flat for flat, _, _ in results.values()]
    assert all(torch.equal(flat, flats[0]) for flat in flats)
    assert (flats[0].double() - expected).abs().max() < 1e-5
    edges = {"0-1-2-3-4#0": ring_edges(range(5)), "control": control_edges("01234")}
    for rank, (_, counters, kept) in results.items():
        places = [(name, peer) for name in sorted(edges) for peer in peers(edges[name], rank)]
        untouched = [] if rank == 1 else sorted(place for place in places if place[1] != 1)
        assert kept == untouched
        changed = len(places) - len(untouched)
        assert counters == Counters(changed, 0 if rank == 1 else changed, len(untouched))


def link_cut_between_stayers(node: Node, pipe: Pipe) -> object:
    dist.barrier()
    pipe.send("ready")
    pipe.recv()
    node.fence.revoke(1, "a link broke")
    if node.rank == 1:
        node.mesh.link("control", 0).close()
    pipe.send("revoked")
    counters = node.switch(*pipe.recv())
    again = node.mesh.switch(Assignment(2, node.rank, node.assignment, {}), 1)
    assert again is counters
    flat = torch.ones(10)
    dist.all_reduce(flat)
    return flat.tolist(), counters.opened


def test_a_link_broken_between_stayers_is_dialed_anew_by_the_switch(tmp_path: Path) -> None:
    with cluster(tmp_path, 3, link_cut_between_stayers) as made:
        made.gather()
        made.tell("revoke")
        made.gather()
        made.tell((2, made.assignment, made.addresses))
        assert made.gather() == [([3.0] * 10, 1), ([3.0] * 10, 1), ([3.0] * 10, 0)]


def switch_without_a_joiner(node: Node, pipe: Pipe) -> object:
    node.fence.revoke(1, "w1 was lost")
    pipe.send("revoked")
    assignment, addresses, joiners = pipe.recv()
    try:
        node.mesh.switch(Assignment(2, node.rank, assignment, addresses, joiners), 0.3)
    except (TimeoutError, ConnectionError) as error:
        return str(error)
    return "switched"


def test_a_switch_whose_joiner_does_not_come_ends_in_time_and_names_it(tmp_path: Path) -> None:
    with cluster(tmp_path, 3, switch_without_a_joiner) as made:
        made.gather()
        nobody = made.addresses | {"x1": ("tcp:127.0.0.1:1",)}
        made.tell((made.assignment | {1: "x1"}, nobody, (1,)), "w0", "w2")
        made.tell((made.assignment, made.addresses, ()), "w1")
        for text in made.gather("w0", "w2"):
            assert "still waiting for x1 (rank 1) in" in text
        assert "still waiting for w" in made.gather("w1")[0]


def other_sizes(node: Node, pipe: Pipe) -> str:
    with pytest.raises((exchange.CollectiveMismatch, RuntimeError)) as caught:
        dist.all_reduce(torch.ones(100_000 + node.rank))
    return str(caught.value)


def test_another_size_on_a_peer_is_an_error_before_data_moves(tmp_path: Path) -> None:
    with cluster(tmp_path, 2, other_sizes) as made:
        texts = made.gather()
    assert "expected ALL_REDUCE number 1 (tag 0) of 400000 bytes, but rank 1" in texts[0]
    assert "is in ALL_REDUCE number 1 (tag 0) of 400004 bytes" in texts[0]


def alone(node: Node) -> None:
    """A standby: rank 1 of 4, no links, everything answered by the group itself."""
    node.admission.mode = Mode.ECHO
    group = dist.new_group([0, 1])
    node.admission.trace = []
    ddp = DistributedDataParallel(model())
    train(ddp, range(2), 1)
    row = [torch.empty(2) for _ in range(4)]
    dist.all_gather(row, torch.ones(2))
    assert all(t.eq(1).all() for t in row)
    received = torch.ones(3)
    dist.recv(received, 0)
    assert not received.any()
    with pytest.raises(RuntimeError, match=r"to be made in set-up, got one of ranks \[0, 1\]"):
        dist.new_group([0, 1])
    dist.barrier(group)
    issued = node.admission.trace
    assert Issued("0-1#0", "barrier", "", ()) in issued
    assert [i.op for i in issued].count("all_reduce") >= 2
    node.admission.trace, node.admission.mode = None, Mode.CLOSED
    with pytest.raises(RuntimeError, match="inside `with step:` blocks, got all_reduce"):
        dist.all_reduce(torch.ones(1))
    node.admission.finished = True
    dist.barrier()


def test_a_standby_answers_its_collectives_by_itself(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child() -> None:
        torch.set_num_threads(1)
        node = Node("s0", 1, 4, tmp_path, theirs)
        alone(node)
        node.close()
        theirs.send("passed")

    process = context.Process(target=child)
    process.start()
    try:
        assert ours.poll(LIMIT_S)
        assert ours.recv() == "passed"
        process.join(5)
    finally:
        process.kill()
        process.join(5)
