"""What a rank, or a subtree of ranks, says about a step, and its bytes."""

import json
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

_BALLOT = struct.Struct("!BIH")  # flags, freeze, how many numbers
_NUMBER = struct.Struct("!HdI")  # bytes of the name, sum, count
_FAILED, _STOP = 1, 2


class Ballot(NamedTuple):
    """What a rank, or a subtree, says about a step."""

    failed: bool = False
    stop: bool = False
    freeze: int = 0
    """Planned generation for which all ranks are to stop at the end of this block; 0: none."""
    numbers: Mapping[str, tuple[float, int]] = MappingProxyType({})
    """What `step.report` got: name -> (sum, count)."""
    replicas: Mapping[str, str] = MappingProxyType({})
    """After the first commit: `<object>/<shard>` -> digest of that rank's state of it."""
    differing: tuple[str, ...] = ()
    """Objects that two ranks of one shard have differently."""

    def plus(self, other: "Ballot") -> "Ballot":
        numbers = dict(self.numbers)
        for name, (total, count) in other.numbers.items():
            own_total, own_count = numbers.get(name, (0.0, 0))
            numbers[name] = (own_total + total, own_count + count)
        replicas, differing = self.replicas, self.differing
        if other.replicas or other.differing:
            both = self.replicas.keys() & other.replicas.keys()
            found = {k.partition("/")[0] for k in both if self.replicas[k] != other.replicas[k]}
            replicas = {**self.replicas, **other.replicas}
            differing = tuple(sorted({*self.differing, *other.differing, *found}))
        return Ballot(
            self.failed or other.failed,
            self.stop or other.stop,
            max(self.freeze, other.freeze),
            numbers,
            replicas,
            differing,
        )

    def to_bytes(self) -> bytes:
        """Packed, and JSON only for what few ballots have: half the time of JSON alone."""
        flags = _FAILED * self.failed | _STOP * self.stop
        data = _BALLOT.pack(flags, self.freeze, len(self.numbers))
        for name, (total, count) in self.numbers.items():
            encoded = name.encode()
            data += _NUMBER.pack(len(encoded), total, count) + encoded
        if self.replicas or self.differing:
            data += json.dumps([dict(self.replicas), self.differing]).encode()
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> "Ballot":
        flags, freeze, count = _BALLOT.unpack_from(data)
        at, numbers = _BALLOT.size, {}
        for _ in range(count):
            name_bytes, total, counted = _NUMBER.unpack_from(data, at)
            at += _NUMBER.size + name_bytes
            numbers[data[at - name_bytes : at].decode()] = (total, counted)
        replicas, differing = json.loads(data[at:]) if at < len(data) else ({}, ())
        failed, stop = bool(flags & _FAILED), bool(flags & _STOP)
        return cls(failed, stop, freeze, numbers, replicas, tuple(differing))

    @property
    def averages(self) -> dict[str, float]:
        return {name: total / count for name, (total, count) in self.numbers.items() if count}
