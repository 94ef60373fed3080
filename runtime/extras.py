"""A rank's own small state between buddies: named parts, packed flat, two versions kept.

After the first message of a generation only changed parts travel; version n+1 is version n with
the changed parts put over it. Source: docs/design/commit.md, rule 3.
"""

import struct
from collections.abc import Mapping

Parts = Mapping[str, bytes]

_COUNT = struct.Struct("!I")
_PART = struct.Struct("!HI")


def pack(parts: Parts, prefix: bytes = b"") -> bytes:
    out = [prefix, _COUNT.pack(len(parts))]
    for name, value in parts.items():
        encoded = name.encode()
        out += (_PART.pack(len(encoded), len(value)), encoded, value)
    return b"".join(out)


def unpack(data: bytes, at: int = 0) -> dict[str, bytes]:
    """The parts from `at` on. Raises ValueError for anything that `pack` does not make."""
    try:
        (count,) = _COUNT.unpack_from(data, at)
        at, parts = at + _COUNT.size, {}
        for _ in range(count):
            name_bytes, value_bytes = _PART.unpack_from(data, at)
            name_at = at + _PART.size
            value_at = name_at + name_bytes
            at = value_at + value_bytes
            if at > len(data):
                raise ValueError("extras end in the middle of a part")
            parts[data[name_at:value_at].decode()] = data[value_at:at]
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"extras are malformed: {error}") from error
    if at != len(data):
        raise ValueError(f"extras have {len(data) - at} bytes too many")
    if len(parts) != count:
        raise ValueError(f"extras name one of {count} parts twice")
    return parts


class Shelf:
    """What this worker keeps of its neighbours' extras: rank -> version -> parts.

    Which versions stay is decided by `commit.keep`; `prune` follows it.
    """

    def __init__(self) -> None:
        self._kept: dict[int, dict[int, dict[str, bytes]]] = {}

    def put(self, rank: int, version: int, parts: Parts, *, full: bool) -> None:
        """Changed parts go over the newest older version. Raises ValueError if there is none."""
        versions = self._kept.setdefault(rank, {})
        if full:
            versions[version] = dict(parts)
            return
        base = max([v for v in versions if v <= version], default=None)
        if base is None:
            raise ValueError(f"changed extras {version} of rank {rank} came before full ones")
        versions[version] = {**versions[base], **parts}

    def prune(self, kept: Mapping[int, tuple[int, ...]]) -> None:
        for rank, versions in self._kept.items():
            stay = kept.get(rank, ())
            for version in [v for v in versions if v not in stay]:
                del versions[version]

    def get(self, rank: int, version: int) -> dict[str, bytes] | None:
        return self._kept.get(rank, {}).get(version)

    def clear(self) -> None:
        self._kept.clear()
