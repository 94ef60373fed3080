"""No late writes: a peer stopped inside a collective wakes up after it was replaced, when the next
collective has reused the buffers; whatever it still sends must not change a byte of a tensor."""

import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ScatterOptions,
)

from trainmover.runtime.admission import Admission
from trainmover.runtime.endpoint import Endpoint
from trainmover.runtime.engine import LinkEngine, Wiring
from trainmover.runtime.fence import Fence
from trainmover.runtime.groups import LinkGroup
from trainmover.runtime.link import Link
from trainmover.runtime.mesh import Mesh
from trainmover.runtime.topology import Assignment, ring_edges
from trainmover.runtime.wire import FRAME_BYTES, HEADER_BYTES
from trainmover.runtime.work import LinkWork

pytestmark = pytest.mark.concurrent
LIMIT_S = 20.0
SIZE, VICTIM = 3, 2
CHANNEL = "0-1-2#0"
SMALL = 100
LARGE = 2 * FRAME_BYTES // 4
"""Elements of a piece: several frames, whatever they travel in."""


# ---- the collectives


@dataclass(frozen=True)
class Case:
    """Rank r has a source and a target, equal at first; both are SIZE pieces long."""

    issue: Callable[[LinkGroup, int, Tensor, Tensor], LinkWork | None]
    """(group, rank, source, target); None on a rank that has no part in it."""
    after: Callable[[int, Sequence[Tensor]], Tensor]
    """(rank, sources of all ranks) -> the target of that rank."""
    piece: int = LARGE


def pieces(tensor: Tensor) -> list[Tensor]:
    return list(tensor.chunk(SIZE))


def first_piece(sources: Sequence[Tensor], rank: int, value: Tensor) -> Tensor:
    """The source of `rank` with another first piece."""
    return torch.cat([value, *pieces(sources[rank])[1:]])


def rooted(options: Any, root: int) -> Any:
    options.rootRank = root
    return options


def reduce(group: LinkGroup, rank: int, source: Tensor, target: Tensor) -> LinkWork:
    return group.reduce([target], rooted(ReduceOptions(), 0))


def broadcast(root: int) -> Case:
    def issue(group: LinkGroup, rank: int, source: Tensor, target: Tensor) -> LinkWork:
        return group.broadcast([target], rooted(BroadcastOptions(), root))

    return Case(issue, lambda rank, sources: sources[root])


def gather(group: LinkGroup, rank: int, source: Tensor, target: Tensor) -> LinkWork:
    outputs = [pieces(target)] if rank == 0 else []
    return group.gather(outputs, [pieces(source)[0]], rooted(GatherOptions(), 0))


def scatter(group: LinkGroup, rank: int, source: Tensor, target: Tensor) -> LinkWork:
    inputs = [pieces(source)] if rank == VICTIM else []
    return group.scatter([pieces(target)[0]], inputs, rooted(ScatterOptions(), VICTIM))


def send_or_receive(group: LinkGroup, rank: int, source: Tensor, target: Tensor) -> LinkWork | None:
    if rank == VICTIM:
        return group.send([source], 0)
    return group.recv([target], VICTIM) if rank == 0 else None


def summed(rank: int, sources: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(sources)).sum(0)


def first_pieces(rank: int, sources: Sequence[Tensor]) -> Tensor:
    return torch.cat([pieces(source)[0] for source in sources])


def own_piece_of_the_sum(rank: int, sources: Sequence[Tensor]) -> Tensor:
    return first_piece(sources, rank, pieces(summed(rank, sources))[rank])


def own_piece_of_each(rank: int, sources: Sequence[Tensor]) -> Tensor:
    return torch.cat([pieces(source)[rank] for source in sources])


CASES = {
    "all_reduce, small": Case(lambda g, r, s, t: g.allreduce([t]), summed, SMALL),
    "all_reduce, large": Case(lambda g, r, s, t: g.allreduce([t]), summed),
    "all_reduce, not contiguous": Case(lambda g, r, s, t: g.allreduce([t.view(-1, 2).t()]), summed),
    "reduce": Case(reduce, lambda r, s: summed(r, s) if r == 0 else s[r]),
    "broadcast, stopped at the root": broadcast(VICTIM),
    "broadcast, stopped on the way": broadcast(1),
    "all_gather": Case(lambda g, r, s, t: g.allgather([pieces(t)], [pieces(s)[0]]), first_pieces),
    "all_gather_single": Case(
        lambda g, r, s, t: g.all_gather_single(t, pieces(s)[0]), first_pieces
    ),
    "reduce_scatter": Case(
        lambda g, r, s, t: g.reduce_scatter([pieces(t)[0]], [pieces(s)]), own_piece_of_the_sum
    ),
    "reduce_scatter_single": Case(
        lambda g, r, s, t: g.reduce_scatter_single(pieces(t)[0], s), own_piece_of_the_sum
    ),
    "all_to_all": Case(lambda g, r, s, t: g.alltoall(pieces(t), pieces(s)), own_piece_of_each),
    "all_to_all_single": Case(
        lambda g, r, s, t: g.all_to_all_single(t, s, [], []), own_piece_of_each
    ),
    "gather": Case(gather, lambda r, s: first_pieces(r, s) if r == 0 else s[r]),
    "scatter": Case(scatter, lambda r, s: first_piece(s, r, pieces(s[VICTIM])[r])),
    "send and receive": Case(send_or_receive, lambda r, s: s[VICTIM if r == 0 else r]),
    "barrier": Case(lambda g, r, s, t: g.barrier(), lambda r, s: s[r], SMALL),
}


def cut_bytes(name: str, scheme: str) -> int:
    """Where the victim stops: in the middle of a frame, or of a header where frames are only
    that: an empty message, or one whose payload lies in shared memory (then of the second)."""
    if name == "barrier":
        return HEADER_BYTES // 2
    if CASES[name].piece == SMALL:
        return HEADER_BYTES + 40
    return HEADER_BYTES + FRAME_BYTES // 2 if scheme == "tcp:" else HEADER_BYTES * 3 // 2


# ---- a rank

NUMBERS = torch.arange(SIZE * LARGE + 1000).fmod_(61).float()
"""Small and whole: their sums are exact in any order."""


class Memory:
    """All tensors of a rank: those of the collectives, and bystanders with known bytes."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._buffers = {
            piece: (torch.empty(SIZE * piece), torch.empty(SIZE * piece))
            for piece in (SMALL, LARGE)
        }
        self._bystanders = [self._pattern(i) for i in range(40)]

    def fill(self, case: Case, turn: int) -> tuple[Tensor, Tensor]:
        """Source and target of a case, both with the values of this turn."""
        source, target = self._buffers[case.piece]
        source.copy_(self._source(case, self._rank, turn))
        target.copy_(source)
        return source, target

    def target(self, case: Case) -> Tensor:
        return self._buffers[case.piece][1]

    def changed(self, case: Case, turn: int) -> list[str]:
        """The tensors that are not as the completed `case` of this turn has left them."""
        source, target = self._buffers[case.piece]
        sources = [self._source(case, rank, turn) for rank in range(SIZE)]
        wrong = [
            f"bystander {i}"
            for i, t in enumerate(self._bystanders)
            if not t.equal(self._pattern(i))
        ]
        wrong += [] if source.equal(sources[self._rank]) else ["source"]
        return wrong + ([] if target.equal(case.after(self._rank, sources)) else ["target"])

    def _pattern(self, index: int) -> Tensor:
        return torch.arange(100 + 2000 * index, dtype=torch.int32) * (2 * index + 1)

    def _source(self, case: Case, rank: int, turn: int) -> Tensor:
        """Others for every rank, and for a turn and the next."""
        return NUMBERS[17 * rank + 5 * turn :][: SIZE * case.piece]


class Cut:
    """A socket through which the process stops itself when so many bytes have left."""

    def __init__(self, sock: socket.socket, left: int) -> None:
        self._sock, self._left = sock, left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        return self.send(b"".join(parts))

    def send(self, data: bytes | memoryview) -> int:
        if not self._left:
            return self._sock.send(data)
        sent = self._sock.send(data[: self._left])
        self._left -= sent
        if not self._left:
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # here, not a little later
        return sent


class Ear:
    """A socket that tells when something has come through it."""

    def __init__(self, sock: socket.socket, heard: threading.Event) -> None:
        self._sock, self._heard = sock, heard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def recvmsg_into(self, views: Sequence[memoryview]) -> tuple[int, list[Any], int, Any]:
        came = self._sock.recvmsg_into(views)
        if came[0]:
            self._heard.set()
        return came


class Rank:
    """A process with endpoint, mesh, fence and one group; the parent calls its methods."""

    def __init__(self, worker: str, rank: int, directory: Path, pipe: Pipe) -> None:
        self.rank = rank
        self.endpoint = Endpoint("job", worker, "m0", b"secret", directory)
        self.fence = Fence()
        self.mesh = Mesh(self.endpoint, self.fence, share_memory=True)
        self.mesh.register(CHANNEL, ring_edges(range(SIZE)))
        self.wiring = Wiring(
            self.mesh, self.fence, Admission(), lambda issued: None, self._on_broken, LIMIT_S
        )
        self.group = self._group()
        self.memory = Memory(rank)
        self.work: LinkWork | None = None
        pipe.send(self.endpoint.addresses)
        while (order := pipe.recv()) is not None:
            name, *arguments = order
            pipe.send(getattr(self, name)(*arguments))
        self.fence.revoke(self.fence.generation, "the test is over")
        self.group.engine.close(LIMIT_S)
        self.mesh.close()
        self.endpoint.close()

    def switch(
        self,
        generation: int,
        assignment: Mapping[int, str],
        addresses: Mapping[str, tuple[str, ...]],
        joiners: Sequence[int],
    ) -> None:
        plan = Assignment(generation, self.rank, assignment, addresses, joiners)
        self.mesh.switch(plan, LIMIT_S / 2)
        self.fence.open(generation)

    def begin(self, name: str, turn: int) -> None:
        case = CASES[name]
        self.work = case.issue(self.group, self.rank, *self.memory.fill(case, turn))

    def run(self, name: str, turn: int) -> list[str]:
        """A whole collective; the tensors that it left wrong."""
        self.begin(name, turn)
        self._end()
        return self.changed(name, turn)

    def stop_inside(self, name: str, turn: int, after_bytes: int) -> None:
        """Stops the process while it sends to rank 0; goes on when it is woken."""
        for link in self._links(0):
            link.sock = cast(socket.socket, Cut(link.sock, after_bytes))
        self.begin(name, turn)
        self._end()

    def join_in(self, name: str, turn: int) -> None:
        """Begins what the victim is stopped in; rank 0 waits until it has got a part of it."""
        heard = threading.Event()
        for link in self._links(VICTIM):
            link.sock = cast(socket.socket, Ear(link.sock, heard))
        self.begin(name, turn)
        assert self.rank != 0 or heard.wait(LIMIT_S), "nothing has come from the victim"

    def revoke(self, name: str) -> tuple[bool, bool]:
        """Whether the collective was cut off, and whether it wrote after the revocation."""
        cut_off = self.work is not None and not self.work.is_completed()
        assert self.fence.revoke(self.fence.generation, "a peer hangs")
        before = self.memory.target(CASES[name]).clone()
        self._end()
        return cut_off, not before.equal(self.memory.target(CASES[name]))

    def abandon(self) -> None:
        """As `revoke`, by a runtime that forgets: for what still runs the generation never ends,
        the links to the leaver stay open, and a new group takes the place of the old."""
        self.abandoned = self.group
        for link in self._links(VICTIM):
            vars(link)["close"] = lambda: None
        self.fence = self.mesh._fence = Fence()
        for link in self._links(1):
            link._fence = self.fence
        self.wiring = replace(self.wiring, fence=self.fence)
        self.group = self._group()

    def abandoned_ends(self) -> None:
        self.abandoned.engine.close(LIMIT_S)

    def changed(self, name: str, turn: int) -> list[str]:
        return self.memory.changed(CASES[name], turn)

    def _links(self, peer: int) -> list[Link]:
        links = (*self.mesh._links.values(), *self.mesh._pairs.values())
        return [link for link in links if link.peer_rank == peer]

    def _group(self) -> LinkGroup:
        return LinkGroup(LinkEngine(self.wiring, CHANNEL, range(SIZE), self.rank))

    def _end(self) -> None:
        if self.work is not None:
            self.work.wait()

    def _on_broken(self, *facts: object) -> None:
        self.fence.revoke(self.fence.generation, f"a link broke: {facts}")


# ---- the test's side


class Ranks:
    """Two stayers, and one worker after the other in the place of the victim."""

    def __init__(self, directory: Path, scheme: str) -> None:
        self.scheme, self.generation = scheme, 0
        self.workers: dict[int, str] = {}
        self._directory = directory
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._pipes: dict[str, Pipe] = {}
        self._processes: dict[str, Any] = {}

    def replace(self, *joiners: int) -> None:
        """Fresh workers for these ranks, and the switch of all ranks to them."""
        self.generation += 1
        for rank in joiners:
            self.workers[rank] = f"w{rank}-{self.generation}"
            self._start(self.workers[rank], rank)
        self.all("switch", self.generation, self.workers, self._addresses, joiners)

    def all(self, name: str, *arguments: object) -> list[Any]:
        """A method of every rank at once; what each returned."""
        return self.call([self.workers[rank] for rank in range(SIZE)], name, *arguments)

    def call(self, workers: Sequence[str], name: str, *arguments: object) -> list[Any]:
        for worker in workers:
            self.tell(worker, name, *arguments)
        return [self.answer(worker) for worker in workers]

    def tell(self, worker: str, name: str, *arguments: object) -> None:
        self._pipes[worker].send((name, *arguments))

    def answer(self, worker: str) -> Any:
        assert self._pipes[worker].poll(LIMIT_S), f"{worker} did not answer in {LIMIT_S} s"
        answer = self._pipes[worker].recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def until_stopped(self, worker: str) -> None:
        """Blocks until the process is stopped, as the kernel says."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            pid, status = os.waitpid(self._pid(worker), os.WUNTRACED | os.WNOHANG)
            if pid and os.WIFSTOPPED(status):
                return
            assert not pid, f"{worker} has ended"
            assert time.monotonic() < deadline, f"{worker} was not stopped in {LIMIT_S} s"
            time.sleep(0.002)

    def wake(self, worker: str) -> None:
        os.kill(self._pid(worker), signal.SIGCONT)

    def end(self, worker: str) -> None:
        """In order; its exit says that nothing of it failed."""
        self._pipes.pop(worker).send(None)
        process = self._processes.pop(worker)
        process.join(LIMIT_S)
        assert process.exitcode == 0, f"{worker} ended with {process.exitcode}"

    def kill(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join(LIMIT_S)

    def _pid(self, worker: str) -> int:
        pid: int = self._processes[worker].pid
        return pid

    def _start(self, worker: str, rank: int) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(worker, rank, self._directory, theirs))
        process.start()
        theirs.close()
        self._pipes[worker], self._processes[worker] = ours, process
        self._addresses[worker] = tuple(
            address for address in self.answer(worker) if address.startswith(self.scheme)
        )


def serve(worker: str, rank: int, directory: Path, pipe: Pipe) -> None:
    torch.set_num_threads(1)
    try:
        Rank(worker, rank, directory, pipe)
    except BaseException:
        pipe.send(RuntimeError(f"in {worker}:\n{traceback.format_exc()}"))


@contextmanager
def ranks(directory: Path, scheme: str) -> Iterator[Ranks]:
    made = Ranks(directory, scheme)
    try:
        made.replace(*range(SIZE))
        yield made
        for worker in made.workers.values():
            made.end(worker)
    finally:
        made.kill()


NOTHING: list[str] = []


def stopped_inside(made: Ranks, name: str, turn: int) -> tuple[str, list[str]]:
    """The victim, stopped in the middle of a collective, and the stayers, in it too."""
    victim, stayers = made.workers[VICTIM], [made.workers[0], made.workers[1]]
    assert made.all("run", name, turn) == [NOTHING] * SIZE
    made.tell(victim, "stop_inside", name, turn + 1, cut_bytes(name, made.scheme))
    made.call(stayers, "join_in", name, turn + 1)
    made.until_stopped(victim)
    return victim, stayers


def a_late_peer_writes_nothing(made: Ranks, name: str, turn: int) -> None:
    victim, stayers = stopped_inside(made, name, turn)
    (cut_off, late), (_, late_too) = made.call(stayers, "revoke", name)
    assert (cut_off, late, late_too) == (True, False, False)  # rank 0 always waits for the victim
    made.replace(VICTIM)
    assert made.all("run", name, turn + 2) == [NOTHING] * SIZE
    made.wake(victim)
    made.answer(victim)
    made.end(victim)
    assert made.all("changed", name, turn + 2) == [NOTHING] * SIZE


@pytest.mark.parametrize("scheme", ["unix:", "tcp:"])
def test_a_peer_that_wakes_up_after_it_was_replaced_writes_into_no_tensor(
    tmp_path: Path, scheme: str
) -> None:
    with ranks(tmp_path, scheme) as made:
        for index, name in enumerate(CASES):
            try:
                a_late_peer_writes_nothing(made, name, turn=3 * index)
            except (AssertionError, RuntimeError) as error:
                raise AssertionError(f"in {name}: {error}") from error


@pytest.mark.parametrize("scheme", ["unix:", "tcp:"])
@pytest.mark.parametrize("name", ["send and receive", "scatter"])
def test_without_the_fence_the_same_comparison_finds_a_late_write(
    tmp_path: Path, name: str, scheme: str
) -> None:
    with ranks(tmp_path, scheme) as made:
        victim, stayers = stopped_inside(made, name, turn=0)
        made.call(stayers[:1], "abandon")
        made.call(stayers[1:], "revoke", name)
        made.replace(VICTIM)
        assert made.all("run", name, 2) == [NOTHING] * SIZE
        made.wake(victim)
        made.answer(victim)
        made.call(stayers[:1], "abandoned_ends")
        assert made.all("changed", name, 2) == [["target"], NOTHING, NOTHING]
        made.end(victim)
