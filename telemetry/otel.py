"""The OpenTelemetry SDK behind `Tracer`: derived ids, given times, exporters by their names."""

import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from trainmover.schemas import trace
from trainmover.telemetry.spans import DIRECTORY, EXPORTERS, JSONL, Span, Unusable, Value

OTLP_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class _Given(IdGenerator):
    """Hands out the ids of the span that is being made."""

    trace_id = span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class Otel:
    def __init__(
        self,
        exporters: Sequence[str],
        process: str,
        service: str,
        about: Mapping[str, str],
        env: Mapping[str, str],
    ) -> None:
        """Raises Unusable."""
        self._ids = _Given()
        self._lock = threading.Lock()
        own = {"service.name": service, **_prefixed(about)}
        resource = Resource.create({**own, **OTELResourceDetector().detect().attributes})
        # No handler at exit: it would wait 30 s for a collector that is away.
        self._provider = TracerProvider(
            id_generator=self._ids, resource=resource, shutdown_on_exit=False
        )
        for name in exporters:
            self._provider.add_span_processor(_processor(name, process, env))
        self._tracer = self._provider.get_tracer("trainmover")

    def emit(self, span: Span) -> None:
        with self._lock:
            self._ids.trace_id = int(trace.trace_id(span.run, span.incident), 16)
            self._ids.span_id = int(trace.span_id(span.run, span.incident, span.name), 16)
            made = self._tracer.start_span(
                span.name,
                context=self._parent(span),
                start_time=span.start_ns,
                attributes=_prefixed(
                    {"run": span.run, "incident": span.incident, **span.attributes}
                ),
            )
            if span.error:
                made.set_status(StatusCode.ERROR, span.error)
            made.end(span.end_ns)

    def _parent(self, span: Span) -> Context:
        """Samplers look at the parent: it was sampled if the root was, which any process knows."""
        if span.parent is None:
            return Context()
        trace_id = self._ids.trace_id
        root = self._provider.sampler.should_sample(Context(), trace_id, trace.ROOT)
        parent = SpanContext(
            trace_id=trace_id,
            span_id=int(trace.span_id(span.run, span.incident, span.parent), 16),
            is_remote=True,
            trace_flags=TraceFlags(
                TraceFlags.SAMPLED if root.decision is Decision.RECORD_AND_SAMPLE else 0
            ),
        )
        return set_span_in_context(NonRecordingSpan(parent), Context())

    def close(self, deadline_s: float) -> None:
        closing = threading.Thread(target=self._provider.shutdown, name="tm-trace", daemon=True)
        closing.start()
        closing.join(deadline_s)


def _prefixed(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {f"trainmover.{name}": value for name, value in attributes.items()}


def _processor(name: str, process: str, env: Mapping[str, str]) -> SpanProcessor:
    """Local ones write at once, so that a kill loses nothing that ended; others in a thread."""
    if name == JSONL:
        return SimpleSpanProcessor(_lines(process, env))
    if name == "console":
        return SimpleSpanProcessor(ConsoleSpanExporter())
    entry = _entry(name, env)
    found = list(entry_points(group="opentelemetry_traces_exporter", name=entry))
    if not found:
        advice = (
            "pip install 'trainmover[otlp]'"
            if entry == "otlp_proto_http"
            else "install its package"
        )
        raise Unusable(
            f"{EXPORTERS}={name}: expected none, console, {JSONL} or an exporter that is installed,"
            f" and {entry} is not: {advice}"
        )
    return BatchSpanProcessor(found[0].load()())


def _entry(name: str, env: Mapping[str, str]) -> str:
    """`otlp` leaves the protocol to a variable of its own; http/protobuf is our default."""
    if name != "otlp":
        return name
    protocol = next((env[key] for key in OTLP_PROTOCOLS if env.get(key)), "http/protobuf")
    return "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"


class _Lines(SpanExporter):
    """A span a line, each appended by one write: two copies of a service may share a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._path.open("ab", buffering=0) as out:
            for span in spans:
                out.write(span.to_json(indent=None).encode() + b"\n")
        return SpanExportResult.SUCCESS


def _lines(process: str, env: Mapping[str, str]) -> SpanExporter:
    if not env.get(DIRECTORY):
        raise Unusable(f"{EXPORTERS}={JSONL} writes below {DIRECTORY}, which is not set: set it")
    path = Path(env[DIRECTORY]) / f"{process}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unusable(f"{DIRECTORY}: {path.parent} cannot be made: {error}") from error
    return _Lines(path)
