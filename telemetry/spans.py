"""A finished span of an incident, and who takes it.

Ids follow from run, incident and name, so whoever writes a span writes the same one, and a child
knows its parent without having met it. Nothing is ever open: who is killed leaves no half span.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trainmover.schemas.trace import ROOT

Value = str | int | float | bool | tuple[str, ...] | tuple[int, ...]

EXPORTERS = "OTEL_TRACES_EXPORTER"
DIRECTORY = "TRAINMOVER_TRACE_DIR"
DISABLED = "OTEL_SDK_DISABLED"
JSONL = "jsonl"
FLUSH_S = 1.0
"""How long the end of a process waits for its last spans to be out."""


@dataclass(frozen=True, slots=True)
class Span:
    run: str
    incident: str
    name: str
    """Unique within the incident."""
    start_ns: int
    """Since 1970, as `end_ns`."""
    end_ns: int
    parent: str | None = ROOT
    """Name of its parent in the same incident; None: it is the root."""
    attributes: Mapping[str, Value] = field(default_factory=dict)
    """Without the prefix `trainmover.` that they get."""
    error: str = ""
    """Why it did not come to its end; empty when it did."""


def ns(seconds: float) -> int:
    """Whole microseconds, which is what a float holds of a time since 1970."""
    return round(seconds * 1e6) * 1000


class Tracer(Protocol):
    def emit(self, span: Span) -> None:
        """Thread-safe. Does not wait for a network."""
        ...

    def close(self, deadline_s: float) -> None:
        """Blocks until everything emitted is out, `deadline_s` at most."""
        ...


class _Silent:
    def emit(self, span: Span) -> None:
        return

    def close(self, deadline_s: float) -> None:
        return


SILENT: Tracer = _Silent()


class Unusable(ValueError):
    """The OTEL_* variables ask for what is not there; says which and what to do."""


def exporters(env: Mapping[str, str]) -> list[str]:
    """Names of those that are wanted; by default none."""
    return [] if env.get(DISABLED, "").strip().lower() == "true" else _named(env)


def _named(env: Mapping[str, str]) -> list[str]:
    names = [name.strip() for name in env.get(EXPORTERS, "").split(",")]
    return [name for name in names if name.lower() not in ("", "none")]


def tracer(process: str, service: str, about: Mapping[str, str], env: Mapping[str, str]) -> Tracer:
    """What the OTEL_* variables in `env` ask for; by default nothing, and nothing is imported.

    `process` names the file of the exporter `jsonl`, `service` is the default of service.name,
    `about` are resource attributes. Raises Unusable. To be called after a fork.
    """
    wanted = exporters(env)
    if not wanted:
        return SILENT
    from trainmover.telemetry.otel import Otel  # the SDK: 0.05 s of CPU

    return Otel(wanted, process, service, about, env)


def into(directory: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Variables that make every child write its spans below `directory` as well. Makes it."""
    directory.mkdir(parents=True, exist_ok=True)
    others = [name for name in _named(env) if name != JSONL]
    return {EXPORTERS: ",".join([*others, JSONL]), DIRECTORY: str(directory.absolute())}
