"""Which chunk is asked of which stream: whoever is free takes the next, so a slow donor gives less.

Pure; who uses it from several threads holds a lock.
"""

from collections import deque
from collections.abc import Hashable, Iterable

from trainmover.runtime.transfer.chunks import Chunk


class Stripes:
    """Every chunk is waiting, out with one stream, or there; what a lost stream had waits again."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._waiting = deque(chunks)
        self._out: dict[Hashable, list[Chunk]] = {}
        self.again = 0
        """Bytes of the chunks that were asked for more than once."""

    @property
    def done(self) -> bool:
        return not self._waiting and not any(self._out.values())

    def take(self, stream: Hashable) -> Chunk | None:
        """The next one to ask `stream` for; None while others have all that is left."""
        if not self._waiting:
            return None
        chunk = self._waiting.popleft()
        self._out.setdefault(stream, []).append(chunk)
        return chunk

    def came(self, stream: Hashable, chunk: Chunk) -> None:
        """It is in place, whole and checked. ValueError if `stream` does not have it."""
        self._out.get(stream, []).remove(chunk)

    def lost(self, stream: Hashable) -> None:
        """What was asked of `stream` will not come from it; it writes nowhere any more."""
        chunks = self._out.pop(stream, [])
        self.again += sum(chunk.length for chunk in chunks)
        self._waiting.extendleft(reversed(chunks))
