"""The loop that moves control messages (votes, extras) over many links at once."""

import select
import time
from collections.abc import Callable, Iterable

from trainmover.runtime.fence import Fence
from trainmover.runtime.link import Link
from trainmover.runtime.wire import Header, Kind


class Pump:
    """The control links of one generation, for the one thread that votes.

    Only links that a poll named are read, and only those with something unsent are flushed: a
    system call that finds nothing to do costs as much as one that does.
    """

    def __init__(self, links: Iterable[Link], fence: Fence) -> None:
        self._fence, self._generation = fence, fence.generation
        self._links = {link.peer_rank: link for link in links}
        self._by_fd = {link.fileno(): link for link in self._links.values()}
        self.unsent: list[Link] = []
        """Whose socket was full."""
        # no poll tells of what came together with the peer's marker
        self._readable = [link for link in self._links.values() if link.has_unread]
        self._poller = select.poll()
        for fd in (fence.wake_fd, *self._by_fd):
            self._poller.register(fd, select.POLLIN)

    def send(self, rank: int, kind: Kind, step: int, payload: bytes) -> None:
        """Send as much as the socket takes now; the next `run` sends the rest.

        Never blocks. Raises Revoked, LinkBroken, and KeyError for a rank that there is no link to.
        """
        link = self._links[rank]
        if not link.send(self._generation, kind, step, payload) and link not in self.unsent:
            self.unsent.append(link)

    def run(
        self,
        handle: Callable[[int, Header, bytes], None],
        until: Callable[[], bool],
        deadline_s: float,
        waiting_for: Callable[[], str] | None = None,
    ) -> None:
        """Send the rest and hand what comes to `handle`, with its rank, until `until()`.

        Blocks for `deadline_s` seconds at most; returns only when all is sent as well.
        Raises Revoked when the generation ends, LinkBroken when a link does, and TimeoutError,
        which names `waiting_for()` or else all the peers.
        """
        deadline = None
        while True:
            self._fence.check(self._generation)
            for link in self._readable:
                for header, payload in link.messages(self._generation):
                    handle(link.peer_rank, header, payload)
                if link.holds_newer:
                    self._watch(link)
            self._readable = []
            if self.unsent:
                self.unsent = [x for x in self.unsent if not x.flush(self._generation)]
            if not self.unsent and until():
                return
            now = time.monotonic()
            deadline = deadline or now + deadline_s
            left_s = deadline - now
            if left_s <= 0:
                raise TimeoutError(
                    f"expected the control messages of generation {self._generation} within "
                    f"{deadline_s} s, still waiting for "
                    f"{waiting_for() if waiting_for else self._names()}"
                )
            self._wait(left_s)

    def _wait(self, timeout_s: float) -> None:
        """Block until a link can go on, the fence is revoked, or `timeout_s` is over."""
        blocked = self.unsent
        for link in blocked:
            self._watch(link, select.POLLOUT)
        ready = self._poller.poll(timeout_s * 1000)
        for link in blocked:
            self._watch(link)
        self._readable = [self._by_fd[fd] for fd, _ in ready if fd in self._by_fd]

    def _watch(self, link: Link, for_sending: int = 0) -> None:
        """Input is of no use while a frame of a newer generation waits in front of it."""
        for_input = 0 if link.holds_newer else select.POLLIN
        self._poller.modify(link.fileno(), for_input | for_sending)

    def _names(self) -> str:
        links = self._links.values()
        return ", ".join(f"rank {link.peer_rank} ({link.peer_worker})" for link in links)
