"""One round of opening links and renewing others, on the way into an assignment."""

import os
import select
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from trainmover.runtime.endpoint import Connection, Endpoint
from trainmover.runtime.fence import Fence, Revoked
from trainmover.runtime.link import Link, LinkBroken
from trainmover.runtime.topology import Assignment, Place

SLICE_S = 0.05
"""A wait looks again this often, whatever wakes it."""


class Opening:
    """Waits for all peers in one poll loop; for the training thread.

    `links` is the mesh's table, which `install` changes. `live`: the generation runs, so that its
    end is the end of this too.
    """

    def __init__(
        self,
        assignment: Assignment,
        deadline: float,
        fence: Fence,
        endpoint: Endpoint,
        links: dict[Place, Link],
        dial: Callable[[Assignment, Place, float], Connection],
        install: Callable[[Place, Connection], object],
        *,
        live: bool,
    ) -> None:
        self._assignment, self._deadline = assignment, deadline
        self._fence, self._endpoint, self._links = fence, endpoint, links
        self._dial, self._install, self._live = dial, install, live
        self.opened: list[Place] = []
        """So far, also after an error."""

    def run(self, missing: Iterable[Place], kept: Iterable[Place]) -> int:
        """Block until all is open and renewed; returns how many links were opened.

        Raises Revoked when the generation is cancelled or ended, TimeoutError that says what it
        waited for, ConnectionError for a peer that cannot be reached.
        """
        self._missing, self._kept = set(missing), set(kept)
        while True:
            self._renew()
            self._open()
            if not self._missing and not self._kept:
                return len(self.opened)
            self._wait()

    def _renew(self) -> None:
        for place in sorted(self._kept):
            try:
                if self._links[place].renewed():
                    self._kept.discard(place)
            except LinkBroken:  # between stayers: dialed anew, by the side that dials anyway
                self._links.pop(place).close()
                self._kept.discard(place)
                self._missing.add(place)

    def _open(self) -> None:
        generation = self._assignment.generation
        for place in sorted(self._missing | self._kept):
            channel, peer = place
            connection: Connection | None
            if not self._assignment.dials(peer):
                # also for a kept link: a new connection says that the peer's end broke
                worker = self._assignment.workers[peer]
                connection = self._endpoint.take(worker, channel, generation)
            elif place in self._missing:
                connection = self._dial(self._assignment, place, self._left_s())
            else:
                continue
            if connection is not None:
                self._install(place, connection)
                self._missing.discard(place)
                self._kept.discard(place)
                self.opened.append(place)

    def _wait(self) -> None:
        poller = select.poll()
        poller.register(self._endpoint.arrival_fd, select.POLLIN)
        if self._live:
            if self._fence.revoked:
                raise Revoked(f"while links were opened: {self._fence.cause}")
            poller.register(self._fence.wake_fd, select.POLLIN)
        for place in self._kept:
            link = self._links[place]
            events = 0 if link.holds_newer else select.POLLIN
            poller.register(link, events | (select.POLLOUT if link.unsent_bytes else 0))
        # in slices: another mesh of this endpoint may have read the word of an arrival
        timeout_s = min(self._left_s(), SLICE_S)
        ready = self._fence.cancellation.poll(self._assignment.generation, poller, timeout_s)
        if any(fd == self._endpoint.arrival_fd for fd, _ in ready):
            with suppress(BlockingIOError):
                os.eventfd_read(self._endpoint.arrival_fd)

    def _left_s(self) -> float:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            workers = self._assignment.workers
            waiting = sorted(self._missing | self._kept)
            names = ", ".join(f"{workers[p]} (rank {p}) in {c}" for c, p in waiting)
            raise TimeoutError(
                f"expected the links of generation {self._assignment.generation} in time, still "
                f"waiting for {names}: check that these workers are alive and got the same plan"
            )
        return left_s
