"""Times, workers and ranks as people read them."""

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise

SECONDS_FROM_S, MINUTES_FROM_S = 10.0, 600.0
MOST_NAMES = 4
"""In a list of workers or ranks; of more, how many there are."""


def duration(seconds: float, like_s: float | None = None) -> str:
    """Milliseconds below 10 s, then seconds, then minutes; or in the unit of `like_s`."""
    scale_s = abs(seconds if like_s is None else like_s)
    if scale_s < MINUTES_FROM_S:
        text = f"{seconds * 1e3:.0f} ms" if scale_s < SECONDS_FROM_S else f"{seconds:.1f} s"
    else:
        text = f"{seconds / 60:.1f} min"
    return text.replace(".0 ", " ")


def clock(time_s: float, timespec: str = "seconds") -> str:
    """Local time of day; `timespec` as `isoformat` takes it."""
    return datetime.fromtimestamp(time_s, UTC).astimezone().time().isoformat(timespec)


def when(at_s: float) -> str:
    """After the beginning of an incident, or before it."""
    return duration(at_s) if at_s >= 0 else f"{duration(-at_s)} before"


def names(workers: Sequence[str]) -> str:
    if len(workers) <= MOST_NAMES:
        return ", ".join(workers)
    shown = MOST_NAMES - 1
    return f"{', '.join(workers[:shown])} and {len(workers) - shown} more"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-3, 5` of ascending numbers; of very many how many they are."""
    starts = [ranks[0], *(b for a, b in pairwise(ranks) if b != a + 1)]
    ends = [*(a for a, b in pairwise(ranks) if b != a + 1), ranks[-1]]
    if len(starts) > MOST_NAMES:
        return f"{len(ranks)} ranks"
    runs = (str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(runs)}"


def printable(text: str) -> str:
    """Without what would move the cursor: texts come from workers and user code."""
    return "".join(c if c.isprintable() else " " for c in text)
