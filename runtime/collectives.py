"""Ring and pairwise collectives over links: the same bits out on every placement.

The order of additions is a function of group size, rank order, message size and dtype alone: for
each piece of a message it follows the ring from that piece's first rank, however frames travel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainmover.runtime.exchange import Call, Incoming, Outgoing, exchange, transfer, writing
from trainmover.runtime.link import Link
from trainmover.runtime.wire import FRAME_BYTES

SMALL_BYTES = 16 * 1024
"""Up to here an all_reduce gathers all values in n-1 hops and adds them in rank order; above, the
ring moves 2(n-1)/n of the bytes in 2(n-1) hops."""

Combine = Callable[[Tensor, Tensor, Tensor], None]
"""(a, b, out): out = a op b, elementwise; out may be b."""


@dataclass(frozen=True)
class Ring:
    """A member's place in its group; links are None in a group of one."""

    rank: int
    size: int
    next: Link | None
    prev: Link | None


def _sum(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.add(a, b, out=out)


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.mul(a, b, out=out)


def _max(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.maximum(a, b, out=out)


def _min(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.minimum(a, b, out=out)


COMBINE: dict[str, Combine] = {
    "SUM": _sum,
    "AVG": _sum,
    "PRODUCT": _product,
    "MAX": _max,
    "MIN": _min,
}
"""By the name of torch's ReduceOp; AVG divides by the group size at the end."""


def raw(flat: Tensor) -> memoryview:
    """The bytes of a contiguous 1-D CPU tensor, shared."""
    array: Any = flat.detach().view(torch.uint8).numpy()
    return memoryview(array)


def all_reduce(call: Call, ring: Ring, flat: Tensor, reduce: str) -> None:
    """Reduce `flat` (1-D, contiguous) over the group, in place on every rank."""
    if ring.size == 1 or not flat.numel():
        return
    if flat.nbytes <= SMALL_BYTES:
        values = flat.new_empty(ring.size, flat.numel())
        values[ring.rank] = flat
        _gather_ring(call, ring, list(values), flat.nbytes)
        total = values[0].clone()
        for value in values[1:]:
            COMBINE[reduce](total, value, total)
        _average(total, ring.size, reduce)
        with writing(call, ring.prev):
            flat.copy_(total)
        return
    chunks = list(flat.tensor_split(ring.size))
    arriving = [chunks[(ring.rank - 2 - step) % ring.size] for step in range(ring.size - 1)]
    _reduce_ring(call, ring, chunks, arriving, flat.nbytes, reduce)
    with writing(call, ring.prev):
        _average(chunks[ring.rank], ring.size, reduce)
    _gather_ring(call, ring, chunks, flat.nbytes)


def reduce_scatter(
    call: Call, ring: Ring, pieces: Sequence[Tensor], out: Tensor, reduce: str
) -> None:
    """Reduce `pieces[r]` over the group into `out` of rank r; all 1-D of the same size.

    `pieces` are not changed; `out` may be this rank's own piece.
    """
    if ring.size == 1:
        out.copy_(pieces[0])
        return
    scratch = [torch.empty_like(out), torch.empty_like(out)]
    arriving = [scratch[step % 2] for step in range(ring.size - 2)] + [out]
    _reduce_ring(call, ring, pieces, arriving, out.nbytes * ring.size, reduce)
    with writing(call, ring.prev):
        _average(out, ring.size, reduce)


def all_gather(call: Call, ring: Ring, piece: Tensor, outs: Sequence[Tensor]) -> None:
    """Put `piece` of rank r into `outs[r]` of every rank; all 1-D of the same size."""
    with writing(call, ring.prev):
        if outs[ring.rank].data_ptr() != piece.data_ptr():
            outs[ring.rank].copy_(piece)
    _gather_ring(call, ring, outs, piece.nbytes * ring.size)


def broadcast(call: Call, ring: Ring, flat: Tensor, root: int) -> None:
    """Copy `flat` of rank `root` to every rank, frame by frame along the ring."""
    if ring.size == 1 or not flat.numel():
        return
    assert ring.next is not None
    assert ring.prev is not None
    view = raw(flat)
    last = (root - 1) % ring.size
    out = Outgoing(call, ring.next, view, len(view)) if ring.rank != last else None
    into = None
    if ring.rank != root:
        into = Incoming(call, ring.prev, view, len(view), len(view))
    transfer(call, out, into, forward=True)


def reduce_to(call: Call, ring: Ring, flat: Tensor, root: int, reduce: str) -> None:
    """Reduce over the group into `flat` of rank `root`; the others keep theirs."""
    total = flat.clone()
    all_reduce(call, ring, total, reduce)
    if ring.rank == root:
        with writing(call, ring.prev):
            flat.copy_(total)


def barrier(call: Call, ring: Ring) -> None:
    """Return when every rank has come here."""
    all_reduce(call, ring, torch.zeros(1, dtype=torch.uint8), "MAX")


def pairwise(
    call: Call,
    ring: Ring,
    links: Callable[[int], Link],
    sent: Sequence[Tensor | None],
    received: Sequence[Tensor | None],
) -> None:
    """Send `sent[r]` to each rank r and receive `received[r]` from it; None and empty ones are no
    transfer. All-to-all, gather and scatter are made of it; the own part is copied.

    `links(r)` gives the direct link to rank r and may block until both ends have come.
    """
    rank, size = ring.rank, ring.size
    own, mine = sent[rank], received[rank]
    if own is not None and mine is not None:
        with writing(call, ring.prev):
            mine.copy_(own)
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        going, coming = _bytes(sent[to]), _bytes(received[source])
        out = Outgoing(call, links(to), going, len(going)) if len(going) else None
        into = None
        if len(coming):
            into = Incoming(call, links(source), coming, len(coming), len(coming))
        transfer(call, out, into)


def _bytes(flat: Tensor | None) -> memoryview:
    return memoryview(b"") if flat is None or not flat.numel() else raw(flat)


def _reduce_ring(
    call: Call,
    ring: Ring,
    own: Sequence[Tensor],
    arriving: Sequence[Tensor],
    total: int,
    reduce: str,
) -> None:
    """Ring reduce-scatter in n-1 hops: piece c starts at rank c+1 and ends, complete, at rank c.

    `arriving[step]` takes what comes in that hop, reduced with the own piece.
    """
    combine, dtype = COMBINE[reduce], own[0].dtype
    scratch = torch.empty(FRAME_BYTES, dtype=torch.uint8)
    sending = own[(ring.rank - 1) % ring.size]
    assert ring.next is not None
    assert ring.prev is not None
    for step in range(ring.size - 1):
        mine, target = own[(ring.rank - 2 - step) % ring.size], arriving[step]

        def apply(
            offset: int, payload: memoryview, mine: Tensor = mine, target: Tensor = target
        ) -> None:
            part = slice(offset // mine.itemsize, (offset + len(payload)) // mine.itemsize)
            combine(torch.frombuffer(payload, dtype=dtype), mine[part], target[part])

        out = Outgoing(call, ring.next, raw(sending), total) if sending.numel() else None
        into = None
        if mine.numel():
            into = Incoming(call, ring.prev, raw(scratch), mine.nbytes, total, apply)
        transfer(call, out, into)
        sending = target


def _gather_ring(call: Call, ring: Ring, pieces: Sequence[Tensor], total: int) -> None:
    """Ring all-gather in n-1 hops; `pieces[rank]` is in place before, all of them after."""
    for step in range(ring.size - 1):
        sent = pieces[(ring.rank - step) % ring.size]
        received = pieces[(ring.rank - 1 - step) % ring.size]
        exchange(call, ring.next, _bytes(sent), ring.prev, _bytes(received), total)


def _average(flat: Tensor, size: int, reduce: str) -> None:
    if reduce != "AVG":
        return
    if flat.is_floating_point() or flat.is_complex():
        flat.div_(size)
    else:
        flat.div_(size, rounding_mode="trunc")


def send(call: Call, link: Link, flat: Tensor) -> None:
    """Send `flat` over a direct link; nothing moves for an empty one."""
    if flat.numel():
        transfer(call, Outgoing(call, link, raw(flat), flat.nbytes), None)


def receive(call: Call, link: Link, flat: Tensor) -> None:
    """Receive into `flat` what the peer's `send` of the same number sent."""
    if flat.numel():
        transfer(call, None, Incoming(call, link, raw(flat), flat.nbytes, flat.nbytes))
