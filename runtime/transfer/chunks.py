"""How the bytes of many tensors are cut up. Pure: donors and pullers cut the same tensors alike."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trainmover.runtime.raw import CHUNK

MAX_RUN = 256
"""Tensors that a chunk may touch; a system call takes twice as many pieces of memory."""


class Chunk(NamedTuple):
    """A descriptor: what is read, sent, checked and asked for again as one."""

    tensor: int
    """Number of the first tensor."""
    offset: int
    """Byte in it."""
    length: int
    """Bytes; they run on into the tensors that follow."""


class Piece(NamedTuple):
    """The bytes of a chunk that are in one tensor."""

    tensor: int
    offset: int
    length: int


def cut(sizes: Sequence[int]) -> list[Chunk]:
    """All bytes of tensors of these sizes, each once and in their order, in chunks of at most CHUNK
    bytes. A chunk begins at a multiple of CHUNK in a tensor, and so with a whole element."""
    chunks: list[Chunk] = []
    room = run = 0
    for tensor, size in enumerate(sizes):
        if size > room or run == MAX_RUN:
            chunks += (Chunk(tensor, at, min(CHUNK, size - at)) for at in range(0, size, CHUNK))
            room, run = -size % CHUNK, 1
        elif size:
            first = chunks[-1]
            chunks[-1] = first._replace(length=first.length + size)
            room, run = room - size, run + 1
    return chunks


def pieces(chunk: Chunk, sizes: Sequence[int]) -> Iterator[Piece]:
    """The chunk, tensor by tensor. Raises ValueError where these tensors have no such bytes."""
    tensor, offset, left = chunk
    if not 0 < left <= CHUNK:
        raise ValueError(f"a chunk of {left} bytes, expected 1 to {CHUNK}")
    while left:
        if tensor >= len(sizes) or offset > sizes[tensor]:
            raise ValueError(f"{chunk} is not within {len(sizes)} tensors")
        if length := min(left, sizes[tensor] - offset):
            yield Piece(tensor, offset, length)
        tensor, offset, left = tensor + 1, 0, left - length
