"""What stands along an axis of time: round times, and labels that do not cover each other."""

from collections.abc import Sequence
from math import floor, log10

from trainmover.cli.phrases import MINUTES_FROM_S, duration


def ticks(end_s: float, most: int) -> list[tuple[float, str]]:
    """Round times from 0 to `end_s` with their labels, at most `most` after the 0, 1 ms apart."""
    unit_s = 60.0 if end_s >= MINUTES_FROM_S else 1.0
    power = unit_s * max(1e-3, 10.0 ** floor(log10(end_s / unit_s / most)))
    step = next(f * power for f in (1, 2, 5, 10, 20) if end_s <= most * f * power)
    places = [min(place * step, end_s) for place in range(floor(end_s / step) + 1)]
    return [(at_s, duration(at_s, like_s=end_s) if at_s else "0") for at_s in places]


def lanes(places: Sequence[float], widths: Sequence[float], gap: float) -> list[int]:
    """Lane (0: lowest) of each label that begins at its place and has a line down from there.

    Ascending `places`. No text covers another, and no line goes through a text.
    """
    found: list[int] = []
    for i in reversed(range(len(places))):
        end = places[i] + widths[i] + gap
        under = (lane for at, lane in zip(places[i + 1 :], found, strict=True) if at < end)
        found.insert(0, max(under, default=-1) + 1)
    return found
