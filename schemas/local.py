"""What a worker says to its agent: one JSON object a line over the agent's Unix socket.

Facts are repeated until the agent acknowledges their id; beats are not.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, TypeAdapter

from trainmover.schemas.events import UserError
from trainmover.schemas.names import Name


class _Line(BaseModel):
    # A loss may become NaN, which JSON has no number for; pydantic's default null cannot be read.
    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")


class Hello(_Line):
    kind: Literal["hello"] = "hello"
    worker: Name


class Fact(_Line):
    """A stored event the agent publishes for the worker, `payload` as the event's JSON."""

    kind: Literal["fact"] = "fact"
    id: NonNegativeInt
    type: str
    payload: str
    time: float
    """When it happened, seconds since 1970."""


class Beat(_Line):
    """Sent every `beat_s`, and at once when a step is committed or the phase changes."""

    kind: Literal["beat"] = "beat"
    worker: Name
    rank: NonNegativeInt | None = None
    generation: NonNegativeInt = 0
    phase: str = "starting"
    """starting, setup, shadow, standby, step, vote, hold, parked, done."""
    committed: NonNegativeInt = 0
    step_s: Annotated[float, Field(ge=0)] = 0.0
    """Duration of the last committed step, seconds."""
    numbers: dict[str, float] = Field(default_factory=dict)
    """What `step.report` got, averaged over the ranks in the vote."""


class Crash(_Line):
    """The exception that is about to end the worker."""

    kind: Literal["crash"] = "crash"
    worker: Name
    error: UserError


LINE: TypeAdapter[Hello | Fact | Beat | Crash] = TypeAdapter(
    Annotated[Hello | Fact | Beat | Crash, Field(discriminator="kind")]
)


class Acknowledged(_Line):
    """The agent's only answer: every fact up to `id` is stored on the bus."""

    id: NonNegativeInt


class Telemetry(BaseModel):
    """Core NATS, not stored: one message per machine and interval, from its agent."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    job: Name
    run: Name
    machine: Name
    interval_s: Annotated[float, Field(gt=0)]
    workers: tuple[Beat, ...]
