"""One process's share of the spans that follow from the stream, emitted as they are closed."""

from trainmover.schemas.recorded import Recorded
from trainmover.schemas.trace import trace_id
from trainmover.telemetry.phases import State, step
from trainmover.telemetry.spans import Span, Tracer

AGAIN_S = 30.0
"""Who starts emits once more what was closed this long before the stream's end: its predecessor
may have been killed before it did. The same ids and content, so a second copy adds nothing."""


class StreamTracer:
    """Not thread-safe."""

    def __init__(self, tracer: Tracer, by: str) -> None:
        """`by`: whose spans, as `detector` or `agent/m1`."""
        self._tracer, self._by = tracer, by
        self._state = State()
        self._run = ""
        self._closed: list[tuple[float, Span]] = []
        """When it was closed, by the stream's clock; not emitted yet."""

    def take(self, recorded: Recorded, *, live: bool) -> None:
        """The next event; `live` from the one on that was the stream's last at the start."""
        self._run = recorded.event.run
        self._state, closed = step(self._state, recorded)
        self._closed += [(recorded.time_s, one.span) for one in closed if one.by == self._by]
        if live:
            for time_s, span in self._closed:
                if recorded.time_s - time_s <= AGAIN_S:
                    self._tracer.emit(span)
            self._closed.clear()

    def facts(self) -> dict[str, object]:
        """For log lines: the generation, and the trace of the incident under way if one is."""
        if not self._state.generation:
            return {}
        facts: dict[str, object] = {"generation": self._state.generation}
        if self._state.incident is not None:
            facts["trace_id"] = trace_id(self._run, self._state.incident.name)
        return facts
