"""Ranks in one process, each with its own links and vote, for tests that need no training."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trainmover.runtime import commit
from trainmover.runtime.admission import Admission
from trainmover.runtime.ballot import Ballot
from trainmover.runtime.commit import Phase
from trainmover.runtime.engine import LinkEngine, Wiring
from trainmover.runtime.links import Links
from trainmover.runtime.seat import Role, Seat
from trainmover.runtime.topology import ring_edges
from trainmover.runtime.vote import Vote
from trainmover.schemas.commands import Collect, Switch
from trainmover.schemas.environment import WorkerEnvironment
from trainmover.schemas.layout import Layout
from trainmover.schemas.member import Member

WITHIN_S = 10.0
"""No call of a test takes longer, or the test fails."""
T = TypeVar("T")


def environment(folder: Path, index: int, size: int) -> WorkerEnvironment:
    """Each worker on a machine of its own."""
    return WorkerEnvironment(
        job="j",
        run="r",
        worker=f"w{index}",
        machine=f"m{index}",
        local_index=0,
        layout=f"dp={size}",
        bus="",
        agent="",
        directory=str(folder),
        secret="5ec2e7",
    )


def assignment(links: Iterable[Links]) -> tuple[Member, ...]:
    """Rank r to the r-th of `links`."""
    return tuple(
        Member(
            rank=rank,
            worker=each.endpoint.worker,
            machine=each.endpoint.machine,
            addresses=each.endpoint.addresses,
        )
        for rank, each in enumerate(links)
    )


def switch(generation: int, members: tuple[Member, ...], target: int = 0) -> Switch:
    """All are joiners in generation 1, none later."""
    return Switch(
        generation=generation,
        layout=Layout.parse(f"dp={len(members)}"),
        members=members,
        placement=tuple(m.machine for m in members),
        joiners=tuple(m.rank for m in members) if generation == 1 else (),
        target=target,
        setup=generation == 1,
    )


def live(command: Switch, rank: int) -> Role:
    return Role(
        rank=rank,
        layout=command.layout,
        generation=command.generation,
        members=command.members,
        placement=command.placement,
        live=True,
    )


@dataclass
class Rank:
    rank: int
    seat: Seat
    links: Links
    vote: Vote
    version: int = 0
    late: int = 0

    @property
    def phase(self) -> Phase:
        return self.seat.position.phase

    def parts(self) -> dict[str, bytes]:
        """The small state of this rank at the start of step `version`."""
        return {"who": bytes([self.rank]), "at": bytes([self.version, self.late])}

    def voted(
        self, ballot: Ballot | None = None, hit: Callable[[str], None] = lambda point: None
    ) -> Ballot:
        """Votes on the open step with what the next one will start from."""
        self.version = self.seat.position.committed + 1
        return self.vote.vote(self.version - 1, ballot or Ballot(), self.parts(), hit)

    def close_block(self) -> None:
        self.seat.move(lambda p: commit.applied(p, poisoned=False, last=False))

    def collect(self, generation: int) -> None:
        self.seat.collect(Collect(generation=generation, assignment="x"), self.links.end)

    def keeps(self, rank: int, version: int) -> dict[str, bytes] | None:
        return self.seat.shelf.get(rank, version)

    def leaves(self, phase: Phase) -> bool:
        return self.seat.wait(lambda: self.phase is not phase, WITHIN_S)

    def reaches(self, phase: Phase) -> bool:
        return self.seat.wait(lambda: self.phase is phase, WITHIN_S)


def engine_of(rank: Rank, size: int) -> LinkEngine:
    """Of the group of all ranks, its ring open. Every rank asks at once, and closes it."""
    data, fence = rank.links.data, rank.links.data_fence
    rank.links.open_data(1)
    data.register("world", ring_edges(range(size)))
    data.connect("world", WITHIN_S)
    wiring = Wiring(data, fence, Admission(), lambda issued: None, lambda *facts: None)
    return LinkEngine(wiring, "world", range(size), rank.rank)


@dataclass
class World:
    ranks: list[Rank]
    pool: ThreadPoolExecutor
    members: tuple[Member, ...]

    def start(self, of: Iterable[Rank], do: Callable[[Rank], T]) -> list[Future[T]]:
        return [self.pool.submit(do, rank) for rank in of]

    def all(self, do: Callable[[Rank], T]) -> list[T]:
        """`do` in every rank at once."""
        return [future.result(WITHIN_S) for future in self.start(self.ranks, do)]

    def begin(self, generation: int, target: int = 0) -> None:
        """Switches to `generation`, extras at the buddies, ready for step `target`."""
        command = switch(generation, self.members, target)

        def begin(rank: Rank) -> None:
            rank.links.switch(command, rank.rank, WITHIN_S)
            if generation == 1:
                rank.seat.start(live(command, rank.rank))
            else:
                rank.seat.move(lambda p: commit.obey(p, generation, target) or p)
            rank.version = target
            rank.vote.rebuddy(target, rank.parts(), 5)
            if generation > 1:
                rank.seat.move(lambda p: commit.resume(p, generation, target, last=False) or p)

        self.all(begin)


@contextmanager
def world(folder: Path, size: int) -> Iterator[World]:
    """`size` ranks in generation 1, before step 0."""
    links = [Links(environment(folder, rank, size)) for rank in range(size)]
    members = assignment(links)
    placement = tuple(m.machine for m in members)
    ranks = []
    for rank, each in enumerate(links):
        each.renew(placement)
        seat = Seat(each.endpoint.worker, lambda: None)
        vote = Vote(seat, each.control, each.control_fence, rank, placement)
        ranks.append(Rank(rank, seat, each, vote))
    with ThreadPoolExecutor(size) as pool:
        made = World(ranks, pool, members)
        try:
            made.begin(1)
            yield made
        finally:
            for each in links:  # whoever still waits is woken
                each.end(1 << 31)
    for each in links:
        each.close()
        each.data_fence.close()
        each.control_fence.close()
        each.cancellation.close()
