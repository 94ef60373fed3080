"""Every parallelism of torch over our groups: the results of gloo, and cut anywhere the same."""

import gc
import itertools
import multiprocessing
import os
import sys
import threading
import warnings
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import parallel
import pytest
import torch
import torch.distributed as dist
from parallelisms import BATCH, CLASSES, FEATURES, LENGTH, build, data_place, mesh_of
from tests.integration import command
from tests.integration.cluster import Node, cluster
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

import trainmover
from trainmover.runtime import dtensors
from trainmover.runtime.aborts import StepAborted
from trainmover.runtime.admission import Admission, Issued, Mode
from trainmover.runtime.remains import forget_losses
from trainmover.runtime.tracked import Tracked
from trainmover.schemas.layout import Layout

SCRIPT = str(Path(__file__).parents[1] / "chaos" / "scripts" / "parallel.py")
RANKS, STEPS = 4, 4
LAYOUT = "dp_replicate=2,dp_shard=2"
EACH = {
    "ddp": ("dp=4", ""),
    "ddp-static": ("dp=4", ""),
    "ddp-unused": ("dp=4", ""),
    "fsdp": ("dp_shard=4", "dp_replicate,dp_shard"),
    "hsdp": ("dp_replicate=2,dp_shard=2", ""),
    "tp": ("dp=2,tp=2", ""),
    "sp": ("tp=4", "dp_replicate,dp_shard"),
    "gpipe": ("pp=2,dp=2", "dp_replicate"),
    "1f1b": ("pp=4", "dp_replicate,dp_shard"),
}
"""Parallelism -> (its axes, along which axes of the job its ranks hold different things)."""
TRAINED = EACH | {"gpipe-unshaped": ("pp=2,dp=2", "dp_replicate")}
"""Stages that ask each other for shapes do so before the first real step: nothing cuts that."""

SETTLING_STEPS = 4
"""Before a step issues what all later ones do: DDP builds buckets again, with static_graph late."""

WAIT_S = 120.0

pytestmark = [pytest.mark.concurrent, pytest.mark.timeout(240)]

Results = list[dict[str, dict[str, Any]]]
"""Rank -> parallelism -> losses and parameters."""


# ---- the results of gloo


def arguments(folder: Path) -> list[str]:
    each = [f"{name}:{axes}:{over}" for name, (axes, over) in TRAINED.items()]
    return [SCRIPT, f"--folder={folder}", f"--steps={STEPS}", "--each", *each]


def over_gloo(folder: Path) -> Results:
    """The script as torchrun starts it, but forked: torch is imported here already."""
    folder.mkdir()
    context = multiprocessing.get_context("fork")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [context.Process(target=plain_rank, args=(r, store.port, folder)) for r in range(RANKS)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(120)
            assert process.exitcode == 0, (folder / "output").read_text()[-6000:]
    finally:
        for process in ranks:
            process.kill()
    return results(folder)


def plain_rank(rank: int, port: int, folder: Path) -> None:
    with (folder / "output").open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.update(
        {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TRAINMOVER_LAYOUT": LAYOUT}
        | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    )
    sys.argv = arguments(folder)
    warnings.simplefilter("default")
    torch.set_num_threads(1)
    trainmover.run(parallel.train)


def over_links(folder: Path) -> Results:
    folder.mkdir()
    launch = (f"--nproc-per-node={RANKS}", "--standbys=0", f"--layout={LAYOUT}")
    outcome = command.run(folder, *launch, *arguments(folder))
    assert outcome.code == 0, outcome.output[-6000:]
    assert "collective.after_the_update" not in outcome.output
    return results(folder)


def results(folder: Path) -> Results:
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


def test_every_parallelism_comes_to_the_results_of_gloo(tmp_path: Path) -> None:
    ours, theirs = over_links(tmp_path / "links"), over_gloo(tmp_path / "gloo")
    for name, (axes, _) in TRAINED.items():
        layout, holders = Layout.parse(axes), dict[str, list[Tensor]]()
        for rank in range(RANKS):
            mine, gloo = ours[rank][name], theirs[rank][name]
            torch.testing.assert_close(mine, gloo, rtol=0, atol=1e-6, msg=f"{name}, rank {rank}")
            first = holders.setdefault(layout.shard(rank), mine["parameters"])
            for parameter, same in zip(mine["parameters"], first, strict=True):
                assert torch.equal(parameter, same), f"{name}: rank {rank} and its replica differ"
        known = [r[name]["losses"] for r in ours if r[name]["losses"]]
        assert known
        assert all(len(losses) == STEPS and losses[-1] < losses[0] for losses in known)
    tensor_parallel = [ours[rank]["sp"] for rank in range(RANKS)]
    assert all(part["losses"] == tensor_parallel[0]["losses"] for part in tensor_parallel)


# ---- cut anywhere


class Together:
    """What the ranks of a test share besides their groups; made before they are forked."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("fork")
        self.barrier = context.Barrier(size, timeout=WAIT_S)
        self.cut = [context.Semaphore(0) for _ in range(size)]


class Cutting(Admission):
    """Ends the generation of every rank when this one is about to issue collective `at`."""

    def __init__(self, together: Together) -> None:
        super().__init__(Mode.SETUP)
        self.count, self.at = 0, -1
        self.revoked = threading.Event()
        self._together = together

    def arm(self, at: int) -> None:
        self.count, self.at = 0, at

    def admit(self, issued: Issued) -> Mode:
        here, self.count = self.count, self.count + 1
        if here == self.at:
            for semaphore in self._together.cut:
                semaphore.release()
            assert self.revoked.wait(WAIT_S)
        return super().admit(issued)


class Training:
    """One parallelism as the runtime sees it: a block's parts one by one."""

    def __init__(self, name: str) -> None:
        mesh = mesh_of(EACH[name][0])
        self.place, _ = data_place(mesh)
        self.part = build(name, mesh)
        self.optimizer = torch.optim.AdamW(self.part.module.parameters(), lr=3e-3)
        self.tracked = Tracked()
        self.tracked.add(module=self.part.module, optimizer=self.optimizer)

    def inputs(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + self.place)
        return torch.randn(BATCH, LENGTH, FEATURES, generator=generator)

    def backward(self, step: int) -> None:
        x = self.inputs(step)
        self.part.backward(x, x.argmax(dim=2) % CLASSES)
        dtensors.sum_partial(self.tracked.dtensors)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def undo(self) -> None:
        forget_losses()
        self.tracked.undo()


def cut_at_collectives(
    together: Together, name: str, stride: int, node: Node, pipe: Pipe
) -> list[str]:
    """Which cut made a step end otherwise than undisturbed; the ranks take turns in cutting."""
    addresses = pipe.recv()
    gc.freeze()  # what pytest has in memory is not searched for schedules
    admission = node.wiring.admission = Cutting(together)

    def revoke_when_cut() -> None:
        while together.cut[node.rank].acquire(timeout=WAIT_S):
            node.fence.revoke(node.fence.generation, "cut here")
            admission.revoked.set()

    threading.Thread(target=revoke_when_cut, daemon=True).start()
    undisturbed, disturbed = Training(name), Training(name)
    for training in (undisturbed, disturbed):
        for step in range(SETTLING_STEPS):
            torch.manual_seed(node.rank)
            admission.arm(-1)
            training.backward(step)
            training.update()
    issued: list[int] = [0] * node.size
    dist.all_gather_object(issued, admission.count)
    cuts = [(r, i) for r, i in zip(itertools.cycle(range(node.size)), range(max(issued)))]
    cuts = [(rank, at) for rank, at in cuts[::stride] if at < issued[rank]]

    differing = []
    for step, (cutter, at) in enumerate(cuts, SETTLING_STEPS):
        admission.revoked.clear()
        digests = []
        for training in (undisturbed, disturbed):
            together.barrier.wait()  # a cut must not reach a rank that is still undisturbed
            torch.manual_seed(100 * step + node.rank)
            training.tracked.open()
            if training is disturbed:
                admission.arm(at if cutter == node.rank else -1)
                with suppress(StepAborted):
                    training.backward(step)
                assert admission.revoked.wait(WAIT_S)
                training.undo()
                together.barrier.wait()
                node.switch(node.fence.generation + 1, node.assignment, addresses)
                training.tracked.open()
            training.backward(step)
            training.update()
            digests.append(training.tracked.state_digest())
        if len(set(digests)) > 1:
            differing.append(f"step {step}: cut by rank {cutter} at collective {at}")
    if name not in ("gpipe", "1f1b"):
        before = disturbed.tracked.shared_digest()
        with torch.no_grad():
            disturbed.part.module(disturbed.inputs(0))
        if disturbed.tracked.shared_digest() != before:
            differing.append("after an evaluation")
    return differing


def differing(folder: Path, name: str, stride: int) -> list[str]:
    body = partial(cut_at_collectives, Together(RANKS), name, stride)
    with cluster(folder, RANKS, body) as made:
        made.tell(made.addresses)
        return [cut for worker in made.assignment.values() for cut in made.receive(worker, WAIT_S)]


@pytest.mark.parametrize(("name", "stride"), [("hsdp", 5), ("1f1b", 3)])
def test_a_step_that_is_cut_and_done_again_is_the_same(
    tmp_path: Path, name: str, stride: int
) -> None:
    assert not differing(tmp_path, name, stride)


@pytest.mark.full
@pytest.mark.parametrize("name", EACH)
def test_a_step_that_is_cut_at_any_collective_and_done_again_is_the_same(
    tmp_path: Path, name: str
) -> None:
    assert not differing(tmp_path, name, 1)
