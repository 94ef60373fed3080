"""How long a step takes on this rank, from one commit to the next."""

import time
from collections import deque
from statistics import median

NORMAL_STEPS = 20
"""A normal step is the median of so many before an interruption."""


class Pace:
    """Not thread-safe."""

    def __init__(self) -> None:
        self.normal_step_s: float | None = None
        """Before the last interruption, in seconds; None: too few were committed here to tell."""
        self._steps_s: deque[float] = deque(maxlen=NORMAL_STEPS)
        self._committed_at: float | None = None
        """Of the last commit since the last interruption, `time.monotonic`."""

    def committed(self) -> None:
        now = time.monotonic()
        if self._committed_at is not None:
            self._steps_s.append(now - self._committed_at)
        self._committed_at = now

    def interrupted(self) -> None:
        self._committed_at = None
        self.normal_step_s = median(self._steps_s) if self._steps_s else None
