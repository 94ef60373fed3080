"""Subjects and stream names, in one place."""

from trainmover.schemas.base import Event
from trainmover.schemas.events import EVENTS

NOUNS: tuple[str, ...] = tuple(dict.fromkeys(t.partition(".")[0] for t in EVENTS))


def stream(job: str) -> str:
    return f"TRAINMOVER_{job}"


def stored(job: str) -> list[str]:
    """Subjects of the job's stream: events of every version, no telemetry, no commands."""
    return [f"trainmover.{job}.{noun}.*.*" for noun in NOUNS]


def objects(job: str) -> str:
    """The bucket for what is too large for a message."""
    return f"TRAINMOVER_{job}"


def event(job: str, model: type[Event] | Event) -> str:
    return f"trainmover.{job}.{model.TYPE}.v{model.VERSION}"


def telemetry(job: str, machine: str = "*") -> str:
    return f"trainmover.{job}.telemetry.{machine}.v1"


def command(job: str, worker: str) -> str:
    return f"trainmover.{job}.command.{worker}.v1"


def agent(job: str, machine: str) -> str:
    """Requests to a machine's agent (`inject`, status)."""
    return f"trainmover.{job}.agent.{machine}.v1"
