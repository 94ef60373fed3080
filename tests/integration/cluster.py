"""Worker processes with everything between the endpoint and torch.distributed, forked on demand."""

import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch._dynamo  # optimizers import it; once here instead of in every child

from trainmover.runtime.admission import Admission, Issued
from trainmover.runtime.backend import init_torch_distributed, shutdown_torch_distributed
from trainmover.runtime.endpoint import Endpoint
from trainmover.runtime.engine import Wiring
from trainmover.runtime.fence import Fence
from trainmover.runtime.mesh import Counters, Mesh
from trainmover.runtime.topology import Assignment, control_edges

LIMIT_S = 20.0
Addresses = Mapping[str, tuple[str, ...]]
T = TypeVar("T")


class Node:
    """One worker process: everything between the endpoint and torch.distributed."""

    def __init__(self, worker: str, rank: int, size: int, directory: Path, pipe: Pipe) -> None:
        self.worker, self.rank, self.size, self.pipe = worker, rank, size, pipe
        self.directory = directory
        self.endpoint = Endpoint("job", worker, "m0", b"secret", directory)
        self.fence = Fence()
        self.mesh = Mesh(self.endpoint, self.fence, share_memory=True)
        self.admission = Admission()
        self.assignment: Mapping[int, str] = {}
        self.counters = Counters(0, 0, 0)
        self.poisoned: list[Issued] = []
        self.broken: list[tuple[int, str, str, str]] = []
        self.wiring = Wiring(
            self.mesh,
            self.fence,
            self.admission,
            self.poisoned.append,
            self._on_broken,
            timeout_s=LIMIT_S,
        )
        self.mesh.register("control", control_edges([f"m{r}" for r in range(size)]))
        self.factory = init_torch_distributed(self.wiring, rank, size)

    def _on_broken(self, *facts: Any) -> None:
        self.broken.append(facts)
        self.fence.revoke(self.fence.generation, f"lost {facts[1]}")

    def switch(
        self, generation: int, assignment: Mapping[int, str], addresses: Addresses, *joiners: int
    ) -> Counters:
        self.assignment = assignment
        plan = Assignment(generation, self.rank, assignment, addresses, joiners)
        counters = self.mesh.switch(plan, LIMIT_S / 2)
        self.fence.open(generation)
        return counters

    def inodes(self) -> dict[tuple[str, int], int]:
        """(channel, peer rank) -> inode of every link."""
        names = ("control", self.factory.groups[0].engine.channel)
        return {
            (name, peer): link.identity()
            for name in names
            for peer, link in self.mesh.links(name).items()
        }

    def close(self) -> None:
        self.fence.revoke(self.fence.generation, "the test is over")
        shutdown_torch_distributed(self.factory, 5)
        self.mesh.close()
        self.endpoint.close()


Body = Callable[[Node, Pipe], object]


class Cluster:
    """The parent's view: starts worker processes and talks to each over a pipe."""

    def __init__(self, directory: Path, size: int, scheme: str = "") -> None:
        self.directory, self.size, self.scheme = directory, size, scheme
        self.addresses: dict[str, tuple[str, ...]] = {}
        self.assignment = {rank: f"w{rank}" for rank in range(size)}
        self.pipes: dict[str, Pipe] = {}
        self.processes: dict[str, Any] = {}

    def start(self, worker: str, rank: int, body: Body) -> None:
        """Fork `worker`: it sends its addresses, waits for the plan, sends what body returns."""
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=self._child, args=(worker, rank, body, theirs))
        process.start()
        theirs.close()
        self.pipes[worker], self.processes[worker] = ours, process
        addresses = self.receive(worker)
        assert isinstance(addresses, tuple)
        self.addresses[worker] = tuple(a for a in addresses if a.startswith(self.scheme))

    def start_all(self, body: Body) -> None:
        for rank, worker in self.assignment.items():
            self.start(worker, rank, body)
        self.tell((1, self.assignment, self.addresses, *range(self.size)))

    def tell(self, word: object, *workers: str) -> None:
        for worker in workers or tuple(self.assignment.values()):
            self.pipes[worker].send(word)

    def receive(self, worker: str, limit_s: float = LIMIT_S) -> Any:
        assert self.pipes[worker].poll(limit_s), f"{worker} did not answer in {limit_s} s"
        answer = self.pipes[worker].recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def gather(self, *workers: str) -> list[Any]:
        return [self.receive(worker) for worker in workers or tuple(self.assignment.values())]

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join(5)

    def _child(self, worker: str, rank: int, body: Body, pipe: Pipe) -> None:
        torch.set_num_threads(1)
        try:
            node = Node(worker, rank, self.size, self.directory, pipe)
            pipe.send(node.endpoint.addresses)
            node.counters = node.switch(*pipe.recv())
            pipe.send(body(node, pipe))
            pipe.recv()  # links stay until all have finished, as the runtime's exit does
            node.close()
        except BaseException:
            pipe.send(RuntimeError(f"in {worker}:\n{traceback.format_exc()}"))


@contextmanager
def cluster(directory: Path, size: int, body: Body, scheme: str = "") -> Iterator[Cluster]:
    """`size` workers in generation 1, running `body`; all must end well once told to."""
    made = Cluster(directory, size, scheme)
    try:
        made.start_all(body)
        yield made
        made.tell("end")
        for worker in made.assignment.values():
            made.processes[worker].join(5)
            assert made.processes[worker].exitcode == 0
    finally:
        made.stop()


def in_ranks(
    body: Callable[[Node], T], directory: Path, size: int, limit_s: float = LIMIT_S
) -> list[T]:
    """What `body` returns in each rank; what it raises in one is raised here."""

    def run(node: Node, _: Pipe) -> T:
        return body(node)

    with cluster(directory, size, run) as made:
        return [made.receive(worker, limit_s) for worker in made.assignment.values()]
