"""Shared state laid open for reads by descriptor: the donor's side of one-sided reads, and the
puller's places for what they bring."""

from collections.abc import Iterable, Sequence

import torch
import xxhash

from trainmover.runtime import codec, raw
from trainmover.runtime.transfer import chunks
from trainmover.runtime.transfer.chunks import Chunk


class Registered:
    """A structure (text) and the live tensors that it numbers. The bytes must not change.

    Several threads may use it. A checksum is computed once, by whoever needs it first.
    """

    def __init__(self, text: bytes, tensors: Sequence[torch.Tensor]) -> None:
        canonical, order = codec.canonical(text)
        self.text = text
        self.structure: str = xxhash.xxh3_128_hexdigest(canonical)
        """Digest of the structure; equal where tensor n is the same everywhere."""
        self._regions = [raw.Region(tensors[index]) for index in order]
        self._sizes = [region.nbytes for region in self._regions]
        self.chunks = chunks.cut(self._sizes)
        self._checksums: dict[Chunk, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self._sizes)

    def read(self, chunk: Chunk) -> list[memoryview]:
        """Its bytes, in place where they can be. ValueError for what is no part of this state."""
        pieces = chunks.pieces(chunk, self._sizes)
        return [self._regions[p.tensor].read(p.offset, p.length) for p in pieces]

    def windows(self, chunk: Chunk) -> list[raw.Window]:
        """Where its bytes go. ValueError for what is no part of this state."""
        pieces = chunks.pieces(chunk, self._sizes)
        return [self._regions[p.tensor].window(p.offset, p.length) for p in pieces]

    def checksum(self, chunk: Chunk) -> int:
        """xxh3_64 of its bytes."""
        found = self._checksums.get(chunk)
        if found is None:
            found = self._checksums[chunk] = checksum(self.read(chunk))
        return found

    def known(self, chunk: Chunk) -> int | None:
        """Its checksum, if that was computed already."""
        return self._checksums.get(chunk)

    def learn(self, chunk: Chunk, value: int) -> None:
        """Somebody else has computed its checksum."""
        self._checksums[chunk] = value

    def adopt(self, other: "Registered") -> None:
        """Take over the checksums of chunks that are the same memory in `other`, if no tensor of
        it lies over another: then a byte was written once, and is what it was when checked."""
        if self.structure != other.structure:
            return
        alone = _alone(other._regions)
        same = [
            a and mine.same_memory(its)
            for a, mine, its in zip(alone, self._regions, other._regions, strict=True)
        ]
        for chunk, value in other._checksums.items():
            if all(same[piece.tensor] for piece in chunks.pieces(chunk, self._sizes)):
                self._checksums[chunk] = value

    def digest(self) -> str:
        """As the function below."""
        return digest(self.structure, (self.checksum(chunk) for chunk in self.chunks))


def checksum(parts: Iterable[memoryview]) -> int:
    """xxh3_64 of all of them, one behind the other."""
    first, *more = parts
    if not more:
        return int(xxhash.xxh3_64_intdigest(first))
    hasher = xxhash.xxh3_64(first)
    for part in more:
        hasher.update(part)
    return int(hasher.intdigest())


def digest(structure: str, checksums: Iterable[int]) -> str:
    """xxh3_128, hex, over a structure and the checksums of all its chunks in their order: equal
    where the shared state is."""
    hasher = xxhash.xxh3_128(structure.encode())
    for value in checksums:
        hasher.update(value.to_bytes(8, "big"))
    return str(hasher.hexdigest())


def _alone(regions: Sequence[raw.Region]) -> list[bool]:
    """Whether a region shares no byte with another one."""
    found = [True] * len(regions)
    order = sorted((r.extent, i) for i, r in enumerate(regions) if r.nbytes)
    end, last = ("", 0), -1
    for (device, first, behind), i in order:
        if (device, first) < end and device == end[0]:
            found[i] = found[last] = False
        if (device, behind) > end:
            end, last = (device, behind), i
    return found
