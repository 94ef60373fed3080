"""What a person sees of a script that no job protects: a few lines of rank 0 on stderr."""

import sys
import time
from collections.abc import Mapping

LINE_EVERY_S = 1.0


class Telling:
    """Progress goes to terminals only; how it began and ended is always said."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self._live = sys.stderr.isatty()
        self._told_at, self._told_steps = time.monotonic(), 0

    def say(self, text: str) -> None:
        if not self._silent:
            print(f"trainmover: {text}", file=sys.stderr, flush=True)

    def committed(self, steps: int, numbers: Mapping[str, float]) -> None:
        """Updates so far, and the last averages of what the script reports."""
        passed_s = time.monotonic() - self._told_at
        if self._live and passed_s >= LINE_EVERY_S:
            rate = (steps - self._told_steps) / passed_s
            self._told_at, self._told_steps = time.monotonic(), steps
            self.say(f"step {steps}{in_words(numbers)}, {rate:.1f} steps/s")


def in_words(numbers: Mapping[str, float]) -> str:
    return "".join(f" {name} {value:.4g}" for name, value in numbers.items())
