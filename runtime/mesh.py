"""All links of the process, and the switch that moves them from one generation to the next."""

import os
import select
import threading
import time
from collections.abc import Collection, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass

from trainmover.runtime.endpoint import Connection, Endpoint
from trainmover.runtime.fence import Fence, Revoked
from trainmover.runtime.link import Link, LinkBroken
from trainmover.runtime.topology import Edge, Place, delta, dialer, peers

_PAIRS = ("/p2p", "/pairs", "/monitored")
"""Ends of the names of channels whose links are opened at first use, apart from the delta."""

_SLICE_S = 0.05  # a wait looks again this often, whatever wakes it


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
        self.rank = -1
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
        self._assignment: dict[int, str] | None = None
        self._addresses: dict[str, tuple[str, ...]] = {}
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
            places = [(channel, peer) for peer in peers(self._channels[channel], self.rank)]
            missing = [place for place in places if place not in self._links]
            _Opening(self, missing, [], (), time.monotonic() + deadline_s, self._fence).run()

    def prepare(
        self,
        generation: int,
        rank: int,
        assignment: Mapping[int, str],
        addresses: Mapping[str, tuple[str, ...]],
        joiners: Collection[int],
        deadline_s: float,
    ) -> None:
        """A joiner of planned `generation` dials ahead what its `switch` will open.

        The other ends authenticate in the background and take the connection in their switch.
        Blocks for `deadline_s` seconds at most; raises ConnectionError for a peer that cannot be
        reached. Doing it again dials only what is missing.
        """
        deadline = time.monotonic() + deadline_s
        with self._lock:
            self._forget_ahead(range(generation))
            for place in delta(self._channels, rank, None, assignment).open:
                channel, peer = place
                if dialer(rank, peer, joiners) == rank and (place, generation) not in self._ahead:
                    worker = assignment[peer]
                    left_s = deadline - time.monotonic()
                    connection = self._dial(addresses[worker], worker, channel, generation, left_s)
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

    def switch(
        self,
        generation: int,
        rank: int,
        assignment: Mapping[int, str],
        addresses: Mapping[str, tuple[str, ...]],
        joiners: Collection[int],
        deadline_s: float,
    ) -> Counters:
        """Move to `assignment` (rank -> worker): close the leaver's links, open the joiner's, keep
        and renew all others. Doing it again for the same generation changes nothing.

        `joiners` are the ranks whose worker is new in this plan (all of them in generation 1); it
        must be the same everywhere, since it says who dials. Runs with the fence revoked and leaves
        it so: `Fence.open(generation)` is the caller's. Blocks for `deadline_s` seconds at most;
        raises TimeoutError saying what it waited for, ConnectionError for a peer that cannot be
        reached, RuntimeError while the old generation is live. After an error only a switch to a
        higher generation helps.
        """
        with self._lock:
            if generation == self.generation and self._assignment == dict(assignment):
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
            change = delta(self._channels, rank, self._assignment, assignment)
            self.rank, self._assignment = rank, dict(assignment)
            self._addresses = dict(addresses)
            closed = self._close_replaced()
            self._adopt_pairs(generation)
            keep = [place for place in change.keep if place in self._links]
            missing = [place for place in (*change.open, *change.keep) if place not in self._links]
            for link in (*self._pairs.values(), *(self._links[place] for place in keep)):
                link.renew(generation, marker=link in self._links.values())
            opening = _Opening(
                self, missing, keep, joiners, time.monotonic() + deadline_s, None, generation
            )
            opened = opening.run()
            self.generation = generation
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
            assert self._assignment is not None
            worker = self._assignment[peer]
            addresses = self._addresses[worker]
        if dialer(self.rank, peer, ()) == self.rank:
            left_s = deadline - time.monotonic()
            return self._dial(addresses, worker, channel, generation, left_s)
        while True:
            self._fence.check(generation)
            left_s = deadline - time.monotonic()
            try:
                return self._endpoint.accept(worker, channel, generation, min(left_s, _SLICE_S))
            except TimeoutError:
                if left_s < _SLICE_S:
                    raise

    def _dial(
        self,
        addresses: tuple[str, ...],
        worker: str,
        channel: str,
        generation: int,
        deadline_s: float,
    ) -> Connection:
        return self._endpoint.dial(
            addresses, worker, channel, generation, deadline_s, share_memory=self._share_memory
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

    def _close_replaced(self) -> int:
        closed = 0
        assert self._assignment is not None
        for table in (self._links, self._pairs):
            for place, link in list(table.items()):
                if link.peer_worker != self._assignment.get(place[1]) or link.fault is not None:
                    table.pop(place).close()
                    closed += table is self._links
        return closed

    def _adopt_pairs(self, generation: int) -> None:
        """Keep direct pairs that a stayer dialed and that nobody here has used yet."""
        assert self._assignment is not None
        ranks = {worker: rank for rank, worker in self._assignment.items()}
        for connection in self._endpoint.withdraw(range(generation), self._owns):
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


class _Opening:
    """One round of opening `missing` links and renewing `kept` ones, in one poll loop."""

    def __init__(
        self,
        mesh: Mesh,
        missing: list[Place],
        kept: list[Place],
        joiners: Collection[int],
        deadline: float,
        fence: Fence | None,
        generation: int | None = None,
    ) -> None:
        self._mesh, self._joiners = mesh, joiners
        self._deadline, self._fence = deadline, fence
        self._generation = mesh.generation if generation is None else generation
        self._missing, self._kept = set(missing), set(kept)
        self._opened = 0

    def run(self) -> int:
        """Block until all is open and renewed; returns how many links were opened."""
        while True:
            self._renew()
            self._open()
            if not self._missing and not self._kept:
                return self._opened
            self._wait()

    def _dials(self, place: Place) -> bool:
        return dialer(self._mesh.rank, place[1], self._joiners) == self._mesh.rank

    def _renew(self) -> None:
        for place in sorted(self._kept):
            try:
                if self._mesh._links[place].renewed():
                    self._kept.discard(place)
            except LinkBroken:  # between stayers: dialed anew, by the side that dials anyway
                self._mesh._links.pop(place).close()
                self._kept.discard(place)
                self._missing.add(place)

    def _open(self) -> None:
        endpoint = self._mesh._endpoint
        for place in sorted(self._missing | self._kept):
            channel, peer = place
            worker = self._worker(peer)
            if not self._dials(place):
                # also for a kept link: a new connection says that the peer's end broke
                connection = endpoint.take(worker, channel, self._generation)
            elif place in self._missing:
                connection = self._mesh._ahead.pop((place, self._generation), None)
                if connection is None:
                    connection = self._mesh._dial(
                        self._mesh._addresses[worker],
                        worker,
                        channel,
                        self._generation,
                        self._left_s(),
                    )
            else:
                continue
            if connection is not None:
                self._mesh._install(place, connection)
                self._missing.discard(place)
                self._kept.discard(place)
                self._opened += 1

    def _wait(self) -> None:
        if self._fence is not None and self._fence.revoked:
            raise Revoked(f"while links were opened: {self._fence.cause}")
        poller = select.poll()
        poller.register(self._mesh._endpoint.arrival_fd, select.POLLIN)
        if self._fence is not None:
            poller.register(self._fence.wake_fd, select.POLLIN)
        for place in self._kept:
            link = self._mesh._links[place]
            events = 0 if link.holds_newer else select.POLLIN
            poller.register(link, events | (select.POLLOUT if link.unsent_bytes else 0))
        # in slices: another mesh of this endpoint may have read the word of an arrival
        ready = poller.poll(min(self._left_s(), _SLICE_S) * 1000)
        if any(fd == self._mesh._endpoint.arrival_fd for fd, _ in ready):
            with suppress(BlockingIOError):
                os.eventfd_read(self._mesh._endpoint.arrival_fd)

    def _worker(self, peer: int) -> str:
        assert self._mesh._assignment is not None
        return self._mesh._assignment[peer]

    def _left_s(self) -> float:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            waiting = sorted(self._missing | self._kept)
            names = ", ".join(f"{self._worker(p)} (rank {p}) in {c}" for c, p in waiting)
            raise TimeoutError(
                f"expected the links of generation {self._generation} in time, still waiting for "
                f"{names}: check that these workers are alive and got the same plan"
            )
        return left_s
