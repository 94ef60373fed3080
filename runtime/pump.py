"""The loop that moves control messages (votes, extras) over many links at once."""

import select
import time
from collections.abc import Callable, Iterable

from trainmover.runtime.fence import Fence
from trainmover.runtime.link import Link
from trainmover.runtime.wire import Header


def pump(
    links: Iterable[Link],
    handle: Callable[[Link, Header, bytes], None],
    until: Callable[[], bool],
    deadline_s: float,
    fence: Fence,
    waiting_for: Callable[[], str] | None = None,
) -> None:
    """Flush every link's queue and hand complete messages to `handle`, until `until()` holds.

    Runs in the calling thread and blocks it for `deadline_s` seconds at most; returns only when
    what was queued is sent as well. Raises Revoked when the generation ends, LinkBroken when a
    link does, and TimeoutError, which names `waiting_for()` or else all the peers.
    """
    links, generation = tuple(links), fence.generation
    deadline = time.monotonic() + deadline_s
    while True:
        fence.check(generation)
        for link in links:
            while (message := link.message(generation)) is not None:
                handle(link, *message)
        flushed = [link.flush(generation) for link in links]
        if all(flushed) and until():
            return
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            names = ", ".join(f"rank {link.peer_rank} ({link.peer_worker})" for link in links)
            raise TimeoutError(
                f"expected the control messages of generation {generation} within {deadline_s} s, "
                f"still waiting for {waiting_for() if waiting_for else names}"
            )
        wait_ready(links, flushed, fence, left_s)


def wait_ready(
    links: Iterable[Link], flushed: Iterable[bool], fence: Fence, timeout_s: float
) -> None:
    """Block until a link can go on, the fence is revoked, or `timeout_s` is over."""
    poller = select.poll()
    poller.register(fence.wake_fd, select.POLLIN)
    for link, done in zip(links, flushed, strict=True):
        events = (0 if link.holds_newer else select.POLLIN) | (0 if done else select.POLLOUT)
        poller.register(link, events)
    poller.poll(timeout_s * 1000)
