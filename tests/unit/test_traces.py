"""Where spans go: what the OTEL_* variables ask for, and what happens when they ask too much."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from tests.unit.planner_histories import ASSIGNED, B_TO_D, completed, failed, submitted

from trainmover.schemas import trace
from trainmover.schemas.base import Event
from trainmover.schemas.recorded import Recorded
from trainmover.telemetry import otel, spans
from trainmover.telemetry.spans import SILENT, Span, Tracer, Unusable
from trainmover.telemetry.stream import AGAIN_S, StreamTracer

ROOT = Span("r", "g2", "incident", 1_000_000_000_000, 3_000_000_000_000, parent=None)
CHILD = Span(
    "r", "g2", "plan g2", 1_000_000_001_000, 2_000_000_000_000, attributes={"ranks": (1, 2)}
)


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """As `--trace-dir` makes it; without what the machine of the test has set."""
    for name in ("OTEL_TRACES_SAMPLER", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    return spans.into(tmp_path / "traces", {})


def made(env: Mapping[str, str]) -> Tracer:
    return spans.tracer("mover", "trainmover-mover", {"job": "j"}, env)


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    files = (tmp_path / "traces").glob("*.jsonl")
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def test_a_span_is_a_line_as_soon_as_it_is_emitted(env: dict[str, str], tmp_path: Path) -> None:
    tracer = made(env)
    tracer.emit(ROOT)
    tracer.emit(CHILD)
    root, child = lines(tmp_path)
    assert root["context"]["trace_id"] == child["context"]["trace_id"]
    assert child["context"]["trace_id"] == "0x" + trace.trace_id("r", "g2")
    assert child["context"]["span_id"] == "0x" + trace.span_id("r", "g2", "plan g2")
    assert (root["parent_id"], child["parent_id"]) == (None, root["context"]["span_id"])
    assert child["start_time"] == "1970-01-01T00:16:40.000001Z"
    assert child["attributes"] == {
        "trainmover.run": "r",
        "trainmover.incident": "g2",
        "trainmover.ranks": [1, 2],
    }
    assert root["resource"]["attributes"].items() >= {
        ("service.name", "trainmover-mover"),
        ("trainmover.job", "j"),
    }


def test_an_error_is_the_status_of_its_span(env: dict[str, str], tmp_path: Path) -> None:
    made(env).emit(Span("r", "g2", "plan g3", 1, 2, error="no standby"))
    (line,) = lines(tmp_path)
    assert line["status"] == {"status_code": "ERROR", "description": "no standby"}


def test_standard_variables_name_the_service(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "cluster=west")
    made(env).emit(ROOT)
    attributes = lines(tmp_path)[0]["resource"]["attributes"]
    assert (attributes["service.name"], attributes["cluster"]) == ("mine", "west")


@pytest.mark.parametrize("sampler", ["always_off", "traceidratio", "parentbased_traceidratio"])
def test_a_trace_is_sampled_as_a_whole_or_not_at_all(
    env: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    tracer = made(env)
    incidents = [f"g{n}" for n in range(2, 34)]
    for incident in incidents:
        tracer.emit(Span("r", incident, "incident", 1, 2, parent=None))
        tracer.emit(Span("r", incident, "plan", 1, 2))
    found = [line["context"]["trace_id"] for line in lines(tmp_path)]
    whole = {trace_id for trace_id in found if found.count(trace_id) == 2}
    assert whole == set(found)
    assert (0 < len(whole) < len(incidents)) is (sampler != "always_off")


@pytest.mark.parametrize(
    "env",
    [{}, {"OTEL_TRACES_EXPORTER": "none"}, {spans.EXPORTERS: "jsonl", "OTEL_SDK_DISABLED": "true"}],
)
def test_by_default_and_when_it_is_disabled_nothing_is_emitted(env: dict[str, str]) -> None:
    assert made(env) is SILENT


def test_by_default_the_sdk_is_not_even_imported() -> None:
    program = (
        "import sys; from trainmover.services import process, shell; import trainmover.agent.agent;"
        "from trainmover.telemetry import spans; spans.tracer('p', 's', {}, {});"
        "sys.exit('opentelemetry' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_an_exporter_that_is_not_installed_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(otel, "entry_points", lambda **_: ())
    with pytest.raises(Unusable, match=r"pip install 'trainmover\[otlp\]'"):
        made({spans.EXPORTERS: "otlp"})
    with pytest.raises(Unusable, match="otlp_proto_grpc is not"):
        made({spans.EXPORTERS: "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})


def test_lines_need_a_folder(tmp_path: Path) -> None:
    with pytest.raises(Unusable, match="TRAINMOVER_TRACE_DIR, which is not set"):
        made({spans.EXPORTERS: "jsonl"})
    (tmp_path / "file").touch()
    with pytest.raises(Unusable, match="cannot be made"):
        made({spans.EXPORTERS: "jsonl", spans.DIRECTORY: str(tmp_path / "file")})


def test_a_folder_for_traces_is_added_to_what_the_variables_ask_for(tmp_path: Path) -> None:
    found = spans.into(tmp_path / "a" / "b", {spans.EXPORTERS: "otlp,jsonl"})
    assert found[spans.EXPORTERS] == "otlp,jsonl"
    assert (tmp_path / "a" / "b").is_dir()


class Collector(SpanExporter):
    """One that is away: what is exported waits until it is let go."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.got: list[str] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.free.wait(30)
        self.got.extend(span.name for span in spans)
        return SpanExportResult.SUCCESS


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    made = Collector()
    found = (SimpleNamespace(load=lambda: lambda: made),)
    monkeypatch.setattr(otel, "entry_points", lambda **_: found)
    yield made
    made.free.set()


def test_a_collector_that_is_away_delays_neither_training_nor_the_end(
    collector: Collector,
) -> None:
    tracer = made({spans.EXPORTERS: "otlp"})
    before = time.monotonic()
    for _ in range(600):  # more than a batch: one is under way, and stuck
        tracer.emit(ROOT)
    tracer.close(0.2)
    assert time.monotonic() - before < 5
    assert collector.got == []


def test_the_end_of_a_process_flushes_what_is_batched(collector: Collector) -> None:
    collector.free.set()
    tracer = made({spans.EXPORTERS: "otlp"})
    tracer.emit(ROOT)
    tracer.close(10)
    assert collector.got == ["incident"]


# ---- a service's share


class Kept:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def emit(self, span: Span) -> None:
        self.spans.append(span)

    def close(self, deadline_s: float) -> None:
        return


HISTORY: tuple[tuple[float, Event], ...] = (
    (0.0, submitted()),
    (1.0, ASSIGNED),
    (9.0, failed("b")),
    (10.0, B_TO_D),
    (11.0, completed(2)),
)


def taken(until: int, *later: tuple[float, Event]) -> list[Span]:
    """Emitted by a mover that starts when the stream has `until` events."""
    kept = Kept()
    stream = StreamTracer(kept, "mover")
    for seq, (time_s, event) in enumerate((*HISTORY, *later), 1):
        stream.take(Recorded(seq, time_s, event), live=seq >= until)
    return kept.spans


def test_a_service_emits_its_own_spans_when_it_reads_what_closes_them() -> None:
    assert [span.name for span in taken(1)] == ["collect g2", "incident"]


def test_a_service_that_starts_emits_again_what_was_closed_lately() -> None:
    assert taken(len(HISTORY)) == taken(1)


def test_a_service_that_starts_does_not_repeat_what_is_long_over() -> None:
    later = (11.5 + AGAIN_S, failed("c"))
    assert taken(len(HISTORY) + 1, later) == []


def test_log_lines_name_the_trace_while_an_incident_is_under_way() -> None:
    stream = StreamTracer(SILENT, "mover")
    facts = []
    for seq, (time_s, event) in enumerate(HISTORY, 1):
        stream.take(Recorded(seq, time_s, event), live=True)
        facts.append(stream.facts())
    under_way = {"generation": 2, "trace_id": trace.trace_id("r1", "g2")}
    assert facts == [{}, {"generation": 1}, {"generation": 1}, under_way, {"generation": 2}]
