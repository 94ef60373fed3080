"""A barrier that finds out who does not come, over direct pairs with group rank 0."""

import time
from collections.abc import Callable

import torch

from trainmover.runtime import collectives
from trainmover.runtime.exchange import Call
from trainmover.runtime.link import Link

_GRACE_S = 0.1
"""Once the time is over, whoever has come answers within this."""

Links = Callable[[Call, int], Link]
"""(call, group rank): the direct link there; blocks until both ends came, TimeoutError."""


def monitored_barrier(call: Call, rank: int, size: int, links: Links, wait_all: bool) -> None:
    """Return when all `size` members have come; else RuntimeError, in the words of torch's own.

    Rank 0 waits until `call.deadline` and names the first rank that did not come, or with
    `wait_all` every one; the others say that rank 0 did not answer them.
    """
    if call.timeout_s <= 0:
        raise RuntimeError(
            f"Rank {rank} timed out in monitoredBarrier after {call.timeout_s:g} s: give it time"
        )
    if rank:
        _report(call, rank, links)
    else:
        _take_in(call, size, links, wait_all)


def _report(call: Call, rank: int, links: Links) -> None:
    try:
        link = links(call, 0)
        collectives.send(call, link, _token())
        collectives.receive(call, link, _token())
    except TimeoutError as error:
        raise RuntimeError(
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting "
            f"for send/recv from rank 0 within {call.timeout_s:g} s: its error names who is missing"
        ) from error


def _take_in(call: Call, size: int, links: Links, wait_all: bool) -> None:
    missing: list[int] = []

    def each(do: Callable[[Call, int], None]) -> None:
        for peer in range(1, size):
            if peer not in missing and (wait_all or not missing):
                left = max(call.deadline, time.monotonic() + _GRACE_S) if missing else call.deadline
                try:
                    do(call._replace(deadline=left), peer)
                except TimeoutError:
                    missing.append(peer)

    def link(call: Call, peer: int) -> None:
        links(call, peer)

    def hear(call: Call, peer: int) -> None:
        collectives.receive(call, links(call, peer), _token())

    each(link)  # before any is waited for: who has come says so while others are missing
    each(hear)
    if missing:
        ranks = (
            f"Ranks {', '.join(map(str, sorted(missing)))}" if wait_all else f"Rank {missing[0]}"
        )
        raise RuntimeError(
            f"{ranks} failed to pass monitoredBarrier in {call.timeout_s * 1000:.0f} ms: look at "
            "what they do instead"
        )
    for peer in range(1, size):
        collectives.send(call, links(call, peer), _token())


def _token() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8)
