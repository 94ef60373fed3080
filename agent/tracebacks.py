"""Eight ranks that fail alike print one traceback: in full for the first, a line for the others."""

from collections.abc import Iterable

START = "Traceback (most recent call last):"
MAX_LINES = 1000
"""Held back until the traceback is complete; CPython itself prints 1000 frames at most."""


class Folded:
    """Lines of one worker's stderr in, the lines to show out."""

    def __init__(self, shown: set[int]) -> None:
        """`shown`: hashes of the frames that were shown, common to all workers of a machine."""
        self._shown = shown
        self._held: list[str] = []

    def feed(self, line: str) -> list[str]:
        """A traceback comes out whole, at its last line, which names the exception."""
        if not self._held and line != START:
            return [line]
        self._held.append(line)
        if line == START or (line.startswith(" ") and len(self._held) < MAX_LINES):
            return []
        held = self.rest()
        frames = hash("\n".join(held[:-1]))
        if frames in self._shown:
            return [f"{line} (its traceback stands above)"]
        self._shown.add(frames)
        return held

    def rest(self) -> list[str]:
        """What is still held back, at the end of the output."""
        held, self._held = self._held, []
        return held


def last_line(lines: Iterable[str]) -> str | None:
    """What names the exception of the first traceback in there; None without one."""
    inside = False
    for line in lines:
        if inside and not line.startswith(" "):
            return line
        inside = inside or line == START
    return None
