"""An incident under way, and the spans that its events close. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainmover.schemas.events import MigrationPlanned
from trainmover.schemas.trace import ROOT
from trainmover.telemetry.spans import Span, Value, ns

DETECTOR, PLANNER, MOVER = "detector", "planner", "mover"


@dataclass(frozen=True, slots=True)
class Closed:
    """A span that an event has closed, and who is to emit it."""

    by: str
    span: Span


@dataclass(frozen=True, slots=True)
class Incident:
    """The one under way."""

    start_s: float
    began_as: str
    """Kind of the first plan."""
    plan: MigrationPlanned
    """The latest."""
    known: int
    """Committed steps that the stream showed before the first plan."""
    phase: str = "collect"
    """Empty between an abort and the next plan."""
    since_s: float = 0.0
    generations: tuple[int, ...] = ()
    leavers: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    target: int | None = None
    verdict: str = ""
    """Kind of the first failure, which may come after a plan to link the same workers again, or
    after the decision of a planned switch."""

    @property
    def kind(self) -> str:
        """A planned switch in which somebody failed after the decision is what that was."""
        return self.verdict or self.began_as

    @property
    def name(self) -> str:
        return self.plan.incident

    @property
    def undecided(self) -> bool:
        """A planned switch that costs nothing if it is dropped."""
        return self.phase in ("prepare", "freeze")


def span(
    plan: MigrationPlanned,
    name: str,
    start_s: float,
    end_s: float,
    more: Mapping[str, Value] | None = None,
    error: str = "",
) -> Span:
    """`name` of a plan's generation, below the root."""
    return Span(
        run=plan.run,
        incident=plan.incident,
        name=f"{name} g{plan.generation}",
        start_ns=ns(start_s),
        end_ns=ns(end_s),
        attributes={"generation": plan.generation, **(more or {})},
        error=error,
    )


def phase(
    incident: Incident, end_s: float, more: Mapping[str, Value] | None = None, error: str = ""
) -> Closed:
    """The phase under way, which ends at `end_s`."""
    return Closed(MOVER, span(incident.plan, incident.phase, incident.since_s, end_s, more, error))


def ended(
    incident: Incident,
    end_s: float,
    outcome: str,
    error: str = "",
    more: Mapping[str, Value] | None = None,
) -> Sequence[Closed]:
    """The last phase and the root. After an abort the planner was at work, on no plan."""
    plan = incident.plan
    if incident.phase:
        last = phase(incident, end_s, more, error)
    else:
        unborn = plan.model_copy(update={"generation": plan.generation + 1})
        last = Closed(PLANNER, span(unborn, "plan", incident.since_s, end_s, more, error))
    attributes: dict[str, Value] = {
        "kind": incident.kind,
        "outcome": outcome,
        "generations": incident.generations,
        "leavers": incident.leavers,
        "joiners": tuple(r.joiner for r in plan.replacements),
        "ranks": incident.ranks,
    }
    if incident.target is not None:
        attributes["lost_steps"] = max(0, incident.known - incident.target)
    root = Span(
        run=plan.run,
        incident=incident.name,
        name=ROOT,
        parent=None,
        start_ns=ns(incident.start_s),
        end_ns=ns(end_s),
        attributes=attributes,
        error=error,
    )
    return last, Closed(MOVER, root)
