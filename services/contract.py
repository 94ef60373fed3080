"""What a service is to the shell: two pure functions over the job's stream.

`evolve` folds every event of the stream, the service's own included; `decide` turns the state
and what is not in the stream (time, telemetry, answers to commands) into outputs. An output is
repeated by `decide` until the stream shows it; the shell publishes each identity once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from trainmover.schemas.base import Event
from trainmover.schemas.commands import Answer, AnyCommand
from trainmover.schemas.recorded import Recorded

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What enters `decide` beside the state."""

    now_s: float
    """The stream's clock now: time of the last event plus what passed here since it came."""
    up_since_s: float
    """When this copy last (re)connected, on the same clock, now while it has no bus: silence
    counts from here at most."""
    heard: Mapping[str, float] = field(default_factory=dict)
    """Machine -> when its telemetry last came, on the same clock."""
    answers: Mapping[str, Answer] = field(default_factory=dict)
    """Worker -> its latest answer to a command of this copy."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a command to a worker and feed the answer back; one is under way per worker."""

    worker: str
    command: AnyCommand


Output = Event | Ask


@dataclass(frozen=True, slots=True)
class Service(Generic[S]):
    name: str
    initial: S
    evolve: Callable[[S, Recorded], S]
    decide: Callable[[S, Inputs], Sequence[Output]]
