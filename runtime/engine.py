"""Runs the collectives of one group: their order, sequence numbers, threads and poison."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog
import torch
from torch import Tensor

from trainmover.runtime.aborts import GenerationRevoked, StepAborted
from trainmover.runtime.admission import Admission, Issued, Mode
from trainmover.runtime.collectives import Ring
from trainmover.runtime.exchange import Call
from trainmover.runtime.fence import Fence, Revoked
from trainmover.runtime.link import Link, LinkBroken
from trainmover.runtime.mesh import Mesh
from trainmover.runtime.wire import Op, Refused
from trainmover.runtime.work import Lane, LinkWork

log = structlog.get_logger()


class _Numbers(dict[str, int]):
    """How many were issued, by lane; each begins behind `first`."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self._first = first

    def __missing__(self, lane: str) -> int:
        return self._first


@dataclass
class Wiring:
    """What the groups of a process share, and whom they tell."""

    mesh: Mesh | None
    """None: this process is the only rank, and its groups answer by themselves (ECHO)."""
    fence: Fence
    admission: Admission
    on_poisoned: Callable[[Issued], None]
    """Told of each collective that was poisoned or refused since its generation had ended."""
    on_broken: Callable[[int, str, str, str], None]
    """(peer rank, peer worker, channel, cause); expected to revoke the fence. Once per group and
    generation."""
    timeout_s: float = 1800.0
    """A collective at most, and opening the links of a new group."""
    training_thread: int = field(default_factory=threading.get_ident)


class LinkEngine:
    """What stands behind one process group; knows nothing of its torch API."""

    def __init__(self, wiring: Wiring, channel: str, ranks: Sequence[int], rank: int) -> None:
        self.wiring, self.channel = wiring, channel
        self.ranks, self.rank = tuple(ranks), rank
        self.issued = 0
        """Collectives issued in this generation; direct sends and receives count apart."""
        self._generation = -1
        self._sent = _Numbers(0)
        self._broken_in = -1
        self._lock = threading.Lock()
        self._lanes: dict[str, Lane] = {}
        self._works: set[LinkWork] = set()
        wiring.fence.watch(self._spoil)

    def issue(
        self,
        issued: Issued,
        op: Op,
        outputs: list[Tensor],
        run: Callable[[Call, Ring], None],
        echo: Callable[[], None],
        inline: bool,
        lane: str = "ring",
        tag: int = 0,
    ) -> LinkWork:
        """Start a collective; with `inline` it may run in the calling thread before this returns.

        Raises RuntimeError where no collective may stand, StepAborted or GenerationRevoked when
        the generation has ended and the caller is not inside a backward.
        """
        work = LinkWork(issued, outputs)
        if self.wiring.admission.admit(issued) is Mode.ECHO:
            with torch.no_grad():
                echo()
            work.end()
            return work
        with self._lock:
            if self.wiring.fence.revoked:
                return self._refuse(work)
            generation = self.wiring.fence.generation
            seq = self._next(generation, lane)
            self._works.add(work)
            job = partial(self._execute, work, run, op, generation, seq, tag)
            if lane not in self._lanes:
                self._lanes[lane] = Lane(f"{self.channel}/{lane}")
            queue = self._lanes[lane]
            claimed = (inline or len(self.ranks) == 1) and queue.claim()
            if not claimed:
                work.help, work.hurry = partial(queue.help, job), queue.hurry
                queue.submit(job)
        if claimed:
            try:
                job()
            finally:
                queue.release()
        return work

    def pair(self, call: Call, peer: int, kind: str) -> Link:
        """The direct link to group rank `peer`; blocks until both ends came."""
        rank, channel = self.ranks[peer], f"{self.channel}/{kind}"
        assert self.wiring.mesh is not None
        try:
            left_s = call.deadline - time.monotonic()
            return self.wiring.mesh.pair(channel, rank, call.generation, left_s)
        except TimeoutError as error:
            raise TimeoutError(
                f"group {self.channel}: expected {call.op.name} number {call.seq} within "
                f"{call.timeout_s} s, but rank {rank} has not come to it: check what it is doing"
            ) from error
        except (ConnectionError, Refused) as error:
            raise LinkBroken(rank, "its worker", channel, str(error)) from error

    def settle(self) -> None:
        """Block until everything that was issued has ended, well or not, or raise TimeoutError."""
        with self._lock:
            works = list(self._works)
        for work in works:
            try:
                work.wait()
            except TimeoutError:
                raise
            except Exception as error:  # of interest to its waiters, if there are any
                log.debug("settle.failed", op=work.issued.op, error=str(error))

    def count_from(self, number: int) -> None:
        """The next collectives of this generation are numbered from `number` on, on every member:
        what a peer has sent before, and nobody has received, is not taken for one of them."""
        with self._lock:
            self._generation = self.wiring.fence.generation
            self.issued, self._sent = number, _Numbers(number)

    def close(self, deadline_s: float) -> None:
        """End the threads; raises TimeoutError while a collective runs in a live generation."""
        self.wiring.fence.unwatch(self._spoil)
        for lane in self._lanes.values():
            lane.close(deadline_s)

    def _next(self, generation: int, lane: str) -> int:
        if generation != self._generation:
            self._generation, self.issued, self._sent = generation, 0, _Numbers(0)
        if lane == "ring":
            self.issued += 1
            return self.issued
        self._sent[lane] += 1
        return self._sent[lane]

    def _execute(
        self,
        work: LinkWork,
        run: Callable[[Call, Ring], None],
        op: Op,
        generation: int,
        seq: int,
        tag: int,
    ) -> None:
        wiring = self.wiring
        deadline = time.monotonic() + wiring.timeout_s
        call = Call(
            wiring.fence, generation, self.channel, op, seq, deadline, wiring.timeout_s, tag
        )
        error: BaseException | None = None
        try:
            with torch.inference_mode():  # else torch would not write an inference tensor here
                run(call, self._ring(call))
        except Revoked:
            work.spoil()
        except LinkBroken as broken:
            self._tell_broken(broken, generation)
            work.spoil()
        except BaseException as other:
            error = other
        if not work.end(error):
            wiring.on_poisoned(work.issued)
        with self._lock:
            self._works.discard(work)

    def _ring(self, call: Call) -> Ring:
        size = len(self.ranks)
        if size == 1:
            return Ring(0, 1, None, None)
        call.fence.check(call.generation)
        assert self.wiring.mesh is not None
        link = self.wiring.mesh.link
        following = link(self.channel, self.ranks[(self.rank + 1) % size])
        preceding = link(self.channel, self.ranks[(self.rank - 1) % size])
        return Ring(self.rank, size, following, preceding)

    def _tell_broken(self, broken: LinkBroken, generation: int) -> None:
        with self._lock:
            told, self._broken_in = self._broken_in == generation, generation
        fence = self.wiring.fence
        if not told and fence.generation == generation and not fence.revoked:
            self.wiring.on_broken(
                broken.peer_rank, broken.peer_worker, broken.channel, broken.cause
            )

    def _spoil(self) -> None:
        with self._lock:
            works = list(self._works)
        for work in works:
            work.spoil()

    def _refuse(self, work: LinkWork) -> LinkWork:
        cause = self.wiring.fence.cause
        self.wiring.on_poisoned(work.issued)
        if torch._C._current_graph_task_id() != -1:  # autograd must be able to finish
            work.spoil()
            work.end()
            return work
        if threading.get_ident() == self.wiring.training_thread:
            raise StepAborted(cause)
        raise GenerationRevoked(
            f"expected a live generation for {work.issued.op} on group {work.issued.group}, "
            f"got one that has ended ({cause}): communicate in the training thread, inside a block"
        )
