"""What a pull has brought."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import xxhash


@dataclass(frozen=True, slots=True)
class Pulled:
    """What came, and both digests of the shared state; the joiner is right where they are equal."""

    donors: Mapping[str, int] = field(default_factory=dict)
    """Bytes that came from each donor that was named, by worker."""
    again: int = 0
    """Bytes that were asked for once more, since who was asked first is gone."""
    seconds: float = 0.0
    donor_digest: str = ""
    digest: str = ""

    @property
    def bytes(self) -> int:
        return sum(self.donors.values())


NOTHING = Pulled()


def together(parts: Sequence[Pulled]) -> Pulled:
    """Several pulls, one after the other, as one."""
    if len(parts) == 1:
        return parts[0]
    donors: Counter[str] = Counter()
    for part in parts:
        donors.update(part.donors)
    return Pulled(
        donors=dict(donors),
        again=sum(part.again for part in parts),
        seconds=sum(part.seconds for part in parts),
        donor_digest=_one(part.donor_digest for part in parts),
        digest=_one(part.digest for part in parts),
    )


def _one(digests: Iterable[str]) -> str:
    return str(xxhash.xxh3_128_hexdigest("\n".join(digests).encode("ascii")))
