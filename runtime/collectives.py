"""Ring and pairwise collectives over links: the same bits out on every placement.

The order of additions is a function of group size, rank order, message size and dtype alone: for
each piece of a message it follows the ring from that piece's first rank, however frames travel.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainmover.runtime.exchange import (
    Call,
    Incoming,
    Landing,
    Outgoing,
    frames,
    transfer,
    writing,
)
from trainmover.runtime.link import Link

SMALL_BYTES = 64 * 1024
"""Up to here an all_reduce gathers all values in n-1 hops and adds them in rank order; above, the
ring moves 2(n-1)/n of the bytes in 2(n-1) hops."""

Combine = Callable[[Tensor, Tensor, Tensor], None]
"""(a, b, out): out = a op b, elementwise; out may be one of them."""
_NOTHING = memoryview(b"")


class Ring(NamedTuple):
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


def _band(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.bitwise_and(a, b, out=out)


def _bor(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.bitwise_or(a, b, out=out)


def _bxor(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.bitwise_xor(a, b, out=out)


COMBINE: dict[str, Combine] = {
    "SUM": _sum,
    "AVG": _sum,
    "PRODUCT": _product,
    "MAX": _max,
    "MIN": _min,
    "BAND": _band,
    "BOR": _bor,
    "BXOR": _bxor,
}
"""By the name of torch's ReduceOp; AVG divides by the group size at the end."""


@cache
def reduces(name: str, dtype: torch.dtype) -> bool:
    """Whether torch has this reduction for tensors of `dtype` on CPU."""
    value = torch.ones(1, dtype=dtype)
    try:
        COMBINE[name](value, value, value)
        _average(value, 1, name)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def raw(flat: Tensor) -> memoryview:
    """The bytes of a contiguous 1-D CPU tensor, shared."""
    array: Any = flat.detach().view(torch.uint8).numpy()
    return memoryview(array)


def all_reduce(call: Call, ring: Ring, flat: Tensor, reduce: str) -> None:
    """Reduce `flat` (1-D, contiguous) over the group, in place on every rank."""
    if ring.size == 1 or not flat.numel():
        return
    if flat.nbytes <= SMALL_BYTES:
        _all_reduce_small(call, ring, flat, reduce)
        return
    chunks = flat.tensor_split(ring.size)
    views = _cut(raw(flat), chunks)
    landings = _reducing(ring, flat.dtype, views, views[ring.rank], reduce, goes_on=True)
    landings += _gathering(ring, views)
    _around(call, ring, views[ring.rank - 1], landings, flat.nbytes)


def _all_reduce_small(call: Call, ring: Ring, flat: Tensor, reduce: str) -> None:
    others = flat.new_empty(ring.size - 1, flat.numel())
    rows, views = [*others], _cut(raw(others.view(-1)), others)
    rows.insert(ring.rank, flat)
    views.insert(ring.rank, raw(flat))
    _around(call, ring, views[ring.rank], _gathering(ring, views), flat.nbytes)
    with writing(call, ring.prev):
        total, combine = rows[0], COMBINE[reduce]
        for row in rows[1:]:
            out = flat if row is rows[-1] else total if row is flat else row
            combine(total, row, out)
            total = out
        _average(flat, ring.size, reduce)


def reduce_scatter(
    call: Call, ring: Ring, pieces: Sequence[Tensor], out: Tensor, reduce: str
) -> None:
    """Reduce `pieces[r]` over the group into `out` of rank r; all 1-D of the same size.

    `pieces` are not changed; `out` may be this rank's own piece.
    """
    if ring.size == 1:
        out.copy_(pieces[0])
        return
    own = [_bytes(piece) for piece in pieces]
    landings = _reducing(ring, out.dtype, own, _bytes(out), reduce, goes_on=False)
    _around(call, ring, own[ring.rank - 1], landings, out.nbytes * ring.size)


def all_gather(call: Call, ring: Ring, piece: Tensor, outs: Sequence[Tensor]) -> None:
    """Put `piece` of rank r into `outs[r]` of every rank; all 1-D of the same size."""
    with writing(call, ring.prev):
        if outs[ring.rank].data_ptr() != piece.data_ptr():
            outs[ring.rank].copy_(piece)
    views = [_bytes(out) for out in outs]
    _around(call, ring, views[ring.rank], _gathering(ring, views), piece.nbytes * ring.size)


def broadcast(call: Call, ring: Ring, flat: Tensor, root: int) -> None:
    """Copy `flat` of rank `root` to every rank, frame by frame along the ring."""
    if ring.size == 1 or not flat.numel():
        return
    view = raw(flat)
    if ring.rank == root:
        _around(call, ring, view, [], len(view))
    else:
        last = ring.rank == (root - 1) % ring.size
        _around(call, ring, _NOTHING, _kept(view, onward=not last), len(view))


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
        out = _outgoing(call, links(to), going) if len(going) else None
        into = _incoming(call, links(source), coming) if len(coming) else None
        transfer(call, out, into)


def _bytes(flat: Tensor | None) -> memoryview:
    return memoryview(b"") if flat is None or not flat.numel() else raw(flat)


def _around(
    call: Call, ring: Ring, first: memoryview, landings: Sequence[Landing], total: int
) -> None:
    """Send `first` to the next rank, and from the one before take what `landings` say."""
    if ring.next is None or ring.prev is None:
        return
    out = Outgoing(call, ring.next, total)
    for frame in frames(first):
        out.put(frame)
    transfer(call, out, Incoming(call, ring.prev, landings, total, out) if landings else None)


def _reducing(
    ring: Ring,
    dtype: torch.dtype,
    own: Sequence[memoryview],
    place: memoryview,
    reduce: str,
    *,
    goes_on: bool,
) -> list[Landing]:
    """Ring reduce-scatter in n-1 hops: piece c starts at rank c+1 and ends, complete, at rank c.

    The own piece is kept at `place` when it is complete, and with `goes_on` sent on too.
    """
    rank, size, combine = ring.rank, ring.size, COMBINE[reduce]
    values = torch.frombuffer

    def apply(came: memoryview, mine: Tensor, out: memoryview) -> None:
        value = values(came, dtype=dtype)
        combine(value, mine, value if out is came else values(out, dtype=dtype))

    def complete(came: memoryview, mine: Tensor, out: memoryview) -> None:
        total = values(out, dtype=dtype)
        combine(values(came, dtype=dtype), mine, total)
        _average(total, size, reduce)

    landings = []
    for hop in range(size - 2):
        for mine in frames(own[(rank - 2 - hop) % size]):
            value = values(mine, dtype=dtype)  # here, where it is cheap: the caches are warm
            landings.append(Landing(len(mine), None, onward=True, apply=apply, own=value))
    for mine, part in zip(frames(own[rank]), frames(place), strict=True):
        value = values(mine, dtype=dtype)
        landings.append(Landing(len(part), part, onward=goes_on, apply=complete, own=value))
    return landings


def _gathering(ring: Ring, views: Sequence[memoryview]) -> list[Landing]:
    """Ring all-gather in n-1 hops; `views[rank]` is in place before, all of them after."""
    last = ring.size - 1
    return [
        landing
        for hop in range(1, ring.size)
        for landing in _kept(views[ring.rank - hop], onward=hop < last)
    ]


def _kept(view: memoryview, onward: bool = False) -> list[Landing]:
    """What takes `view` as it comes."""
    return [Landing(len(frame), frame, onward) for frame in frames(view)]


def _cut(view: memoryview, pieces: Iterable[Tensor]) -> list[memoryview]:
    """The parts of `view` that hold the `pieces`, which lie there one behind the other."""
    cut, start = [], 0
    for piece in pieces:
        end = start + piece.nbytes
        cut.append(view[start:end])
        start = end
    return cut


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
        transfer(call, _outgoing(call, link, raw(flat)), None)


def receive(call: Call, link: Link, flat: Tensor) -> None:
    """Receive into `flat` what the peer's `send` of the same number sent."""
    if flat.numel():
        transfer(call, None, _incoming(call, link, raw(flat)))


def _outgoing(call: Call, link: Link, view: memoryview) -> Outgoing:
    out = Outgoing(call, link, len(view))
    for frame in frames(view):
        out.put(frame)
    return out


def _incoming(call: Call, link: Link, view: memoryview) -> Incoming:
    return Incoming(call, link, _kept(view), len(view))
