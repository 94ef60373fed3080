"""All links of the process, and the switch that moves them from one generation to the next."""

import threading
import time
from collections.abc import Collection, Container
from dataclasses import dataclass, replace

from trainmover.runtime.endpoint import Connection, Endpoint
from trainmover.runtime.fence import Cancellation, Fence, Revoked
from trainmover.runtime.link import Link
from trainmover.runtime.opening import SLICE_S, Opening
from trainmover.runtime.topology import Assignment, Edge, Place, delta, peers

_PAIRS = ("/p2p", "/pairs", "/monitored")
"""Ends of the names of channels whose links are opened at first use, apart from the delta."""


@dataclass(frozen=True)
class Counters:
    """What a switch did with the links of this rank."""

    opened: int
    closed: int
    kept: int


class Mesh:
    """The links of this worker: per channel and peer rank, in the assignment of one generation.

    A channel is registered once, when its group is made, and lives as long as the job. Links of
    registered channels exist after `switch` or `connect`; direct pairs after `pair`.
    """

    def __init__(self, endpoint: Endpoint, fence: Fence, *, share_memory: bool = False) -> None:
        """`share_memory`: links within a machine carry large payloads in memory (shm.py)."""
        self.generation = 0
        self.pairs_opened = 0
        """Direct pairs made so far; they are no part of `Counters`."""
        self._endpoint, self._fence = endpoint, fence
        self._share_memory = share_memory
        self._channels: dict[str, frozenset[Edge]] = {}
        self._links: dict[Place, Link] = {}
        self._pairs: dict[Place, Link] = {}
        self._ahead: dict[tuple[Place, int], Connection] = {}
        """What a joiner dialed for a planned generation, by that; its peers' ends wait at theirs.
        """
        self._assignment: Assignment | None = None
        """The one that was switched to last."""
        self._counters = Counters(0, 0, 0)
        self._turns: dict[Place, threading.Lock] = {}  # one opening of a pair at a time
        self._lock = threading.RLock()  # one switch or connect at a time

    def register(self, channel: str, edges: Collection[Edge]) -> None:
        """Declare a channel; again with the same edges changes nothing, else ValueError."""
        known = self._channels.setdefault(channel, frozenset(edges))
        if known != frozenset(edges):
            raise ValueError(
                f"expected channel {channel} with edges {sorted(known)} as before, "
                f"got {sorted(edges)}: give another set of links another name"
            )

    @property
    def channels(self) -> tuple[str, ...]:
        """Names of the registered channels."""
        return tuple(self._channels)

    def link(self, channel: str, peer_rank: int) -> Link:
        """The link to `peer_rank`; raises KeyError while it is not open."""
        try:
            return self._links[channel, peer_rank]
        except KeyError:
            raise KeyError(
                f"expected an open link to rank {peer_rank} in channel {channel}, got none: "
                "switch() or connect() the channel first"
            ) from None

    def links(self, channel: str) -> dict[int, Link]:
        """Peer rank -> open link, of one channel."""
        return {peer: link for (name, peer), link in self._links.items() if name == channel}

    def connect(self, channel: str, deadline_s: float) -> None:
        """Open the missing links of a channel in the live generation; the lower rank dials.

        Blocks until all are open; raises TimeoutError naming the peers that did not come,
        ConnectionError for one that cannot be reached, Revoked when the generation ends.
        """
        with self._lock:
            now = self._current
            places = [(channel, peer) for peer in peers(self._channels[channel], now.rank)]
            missing = [place for place in places if place not in self._links]
            self._opening(replace(now, joiners=()), deadline_s, live=True).run(missing, ())

    def prepare(self, assignment: Assignment, deadline_s: float) -> None:
        """A joiner of a planned generation dials ahead what its `switch` will open.

        The other ends authenticate in the background and take the connection in their switch.
        Blocks for `deadline_s` seconds at most; raises ConnectionError for a peer that cannot be
        reached, Revoked when the generation is cancelled. Doing it again dials only what is
        missing.
        """
        generation, deadline = assignment.generation, time.monotonic() + deadline_s
        with self._lock:
            self._forget_ahead(range(generation))
            for place in delta(self._channels, assignment.rank, None, assignment.workers).open:
                if assignment.dials(place[1]) and (place, generation) not in self._ahead:
                    left_s = deadline - time.monotonic()
                    connection = self._dial(assignment, place, left_s, self._fence.cancellation)
                    self._ahead[place, generation] = connection

    def drop(self, generation: int) -> None:
        """Close what was opened ahead for planned `generation`, here or by a joiner."""
        with self._lock:
            self._forget_ahead((generation,))
            for connection in self._endpoint.withdraw((generation,), self._owns):
                connection.close()

    def _forget_ahead(self, generations: Container[int]) -> None:
        for key in [key for key in self._ahead if key[1] in generations]:
            self._ahead.pop(key).close()

    def switch(self, assignment: Assignment, deadline_s: float) -> Counters:
        """Move to `assignment`: close the leaver's links, open the joiner's, keep and renew all
        others. Doing it again for the same generation changes nothing.

        Runs with the fence revoked and leaves it so: `Fence.open(generation)` is the caller's.
        Blocks for `deadline_s` seconds at most; raises Revoked when the generation is cancelled,
        TimeoutError saying what it waited for, ConnectionError for a peer that cannot be reached,
        RuntimeError while the old generation is live. After an error nothing is open that was
        opened for it, and only a switch to a higher generation helps.
        """
        generation = assignment.generation
        with self._lock:
            self._fence.cancellation.check(generation)
            before = self._assignment
            if before and (generation, assignment.workers) == (self.generation, before.workers):
                return self._counters
            if generation <= self.generation:
                raise ValueError(
                    f"expected a generation above {self.generation} or the same assignment again, "
                    f"got generation {generation}: each plan has its own generation"
                )
            if not self._fence.revoked:
                raise RuntimeError(
                    f"expected generation {self._fence.generation} to be revoked before the switch "
                    f"to {generation}, it is live: revoke it first"
                )
            workers = before.workers if before else None
            change = delta(self._channels, assignment.rank, workers, assignment.workers)
            closed = self._close_replaced(assignment)
            self._adopt_pairs(assignment)
            keep = [place for place in change.keep if place in self._links]
            missing = [place for place in (*change.open, *change.keep) if place not in self._links]
            for link in (*self._pairs.values(), *(self._links[place] for place in keep)):
                link.renew(generation, marker=link in self._links.values())
            opening = self._opening(assignment, deadline_s, live=False)
            try:
                opened = opening.run(missing, keep)
            except BaseException:
                for place in opening.opened:
                    self._links.pop(place).close()
                raise
            self.generation, self._assignment = generation, assignment
            self._forget_ahead(range(generation + 1))
            self._counters = Counters(opened, closed, len(change.open) + len(change.keep) - opened)
            return self._counters

    def pair(self, channel: str, peer_rank: int, generation: int, deadline_s: float) -> Link:
        """The direct link to `peer_rank` in a channel of direct pairs, opened at first use.

        The lower rank dials, so the call blocks until both sides have come here, at most
        `deadline_s`; raises like `connect`. Other pairs are opened meanwhile.
        """
        place = (channel, peer_rank)
        with self._lock:
            turn = self._turns.setdefault(place, threading.Lock())
        with turn:
            link = self._pairs.get(place)
            if link is not None and link.fault is None:
                return link
            connection = self._pair_up(place, generation, time.monotonic() + deadline_s)
            with self._lock:
                if self.generation != generation:
                    connection.close()
                    raise Revoked(f"generation {generation} ended while {place} was opened")
                self.pairs_opened += 1
                return self._install(place, connection)

    def _pair_up(self, place: Place, generation: int, deadline: float) -> Connection:
        channel, peer = place
        with self._lock:
            self._fence.check(generation)
            now = replace(self._current, joiners=())
        if now.dials(peer):
            return self._dial(now, place, deadline - time.monotonic())
        while True:
            self._fence.check(generation)
            left_s, worker = deadline - time.monotonic(), now.workers[peer]
            try:
                return self._endpoint.accept(worker, channel, generation, min(left_s, SLICE_S))
            except TimeoutError:
                if left_s < SLICE_S:
                    raise

    @property
    def _current(self) -> Assignment:
        assert self._assignment is not None
        return self._assignment

    def _opening(self, assignment: Assignment, deadline_s: float, *, live: bool) -> Opening:
        return Opening(
            assignment,
            time.monotonic() + deadline_s,
            self._fence,
            self._endpoint,
            self._links,
            self._dial_or_take,
            self._install,
            live=live,
        )

    def _dial_or_take(self, assignment: Assignment, place: Place, left_s: float) -> Connection:
        """For the training thread; what was dialed ahead is there already."""
        ahead = self._ahead.pop((place, assignment.generation), None)
        return ahead or self._dial(assignment, place, left_s, self._fence.cancellation)

    def _dial(
        self,
        assignment: Assignment,
        place: Place,
        deadline_s: float,
        cancellation: Cancellation | None = None,
    ) -> Connection:
        channel, peer = place
        worker = assignment.workers[peer]
        return self._endpoint.dial(
            assignment.addresses[worker],
            worker,
            channel,
            assignment.generation,
            deadline_s,
            share_memory=self._share_memory,
            cancellation=cancellation,
        )

    def close(self) -> None:
        """Close every link."""
        with self._lock:
            for link in (*self._links.values(), *self._pairs.values()):
                link.close()
            self._links.clear()
            self._pairs.clear()
            for connection in self._ahead.values():
                connection.close()
            self._ahead.clear()

    def _close_replaced(self, assignment: Assignment) -> int:
        closed = 0
        for table in (self._links, self._pairs):
            for place, link in list(table.items()):
                same = link.peer_worker == assignment.workers.get(place[1])
                if not same or link.fault is not None:
                    table.pop(place).close()
                    closed += table is self._links
        return closed

    def _adopt_pairs(self, assignment: Assignment) -> None:
        """Keep direct pairs that a stayer dialed and that nobody here has used yet."""
        ranks = {worker: rank for rank, worker in assignment.workers.items()}
        for connection in self._endpoint.withdraw(range(assignment.generation), self._owns):
            place = (connection.channel, ranks.get(connection.peer, -1))
            if place[1] < 0 or not place[0].endswith(_PAIRS) or place in self._pairs:
                connection.close()
            else:
                self._install(place, connection)

    def _owns(self, channel: str) -> bool:
        """Whether a channel is of this mesh: others may share the endpoint."""
        return channel in self._channels or channel.rpartition("/")[0] in self._channels

    def _install(self, place: Place, connection: Connection) -> Link:
        channel, peer = place
        generation = connection.generation
        link = Link(
            connection.sock,
            peer,
            connection.peer,
            channel,
            generation,
            self._fence,
            connection.memory,
        )
        table = self._pairs if channel.endswith(_PAIRS) else self._links
        replaced = table.pop(place, None)
        if replaced is not None:
            replaced.close()
        table[place] = link
        return link
