"""An event as the stream keeps it."""

from dataclasses import dataclass

from trainmover.schemas.base import Event


@dataclass(frozen=True, slots=True)
class Recorded:
    seq: int
    """Position in the job's stream, from 1."""
    time_s: float
    """When the server stored it, seconds since 1970: one clock for all events of a job."""
    event: Event
    occurred_s: float = 0.0
    """`ce-time`: when it happened by the clock of who says so; only for display."""
