"""An incident as rows of spans over one axis of time: what every picture of it is drawn from."""

from collections.abc import Iterator
from dataclasses import dataclass

from trainmover.cli.incidents import Incident
from trainmover.cli.phrases import duration, names, ranks_in_words
from trainmover.cli.rows import Kind, Row, rows

CLOCK_TOLERANCE_S = 0.05
"""A worker's time that is moved by more than this is said to be."""
MARKED_PLANS = 3
"""Of those that were given up: the latest."""
SHORTEST_S = 0.01
"""An axis is at least so long."""


@dataclass(frozen=True, slots=True)
class Milestone:
    name: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Chart:
    """Times are seconds after the incident's `t0`."""

    title: str
    cost: str
    end_s: float
    rows: tuple[Row, ...]
    milestones: tuple[Milestone, ...]
    notes: tuple[str, ...]
    """What must be known to read it right."""

    @property
    def kinds(self) -> list[Kind]:
        """Those drawn, in the order of the course."""
        drawn = {span.kind for row in self.rows for span in row.spans}
        return [kind for kind in Kind if kind in drawn]


def chart(incident: Incident, max_ranks: int = 16) -> Chart:
    """`max_ranks`: see `rows`."""
    return Chart(
        title=title(incident),
        cost=cost(incident),
        end_s=max(SHORTEST_S, incident.last_s),
        rows=tuple(rows(incident, max_ranks)),
        milestones=tuple(milestones(incident)),
        notes=tuple(_notes(incident)),
    )


def title(incident: Incident) -> str:
    aside = " in a move" if incident.planned and incident.kind != "planned" else ""
    what = f"{incident.kind}{aside}, {incident.outcome}"
    return f"incident {incident.incident} ({what}): {moved(incident)}"


def moved(incident: Incident) -> str:
    """Who lost which rank to whom."""
    if not incident.leavers:
        return "the same workers, linked again"
    if incident.planned and not incident.joiners:
        stay = "stays" if len(incident.ranks) == 1 else "stay"
        return f"{ranks_in_words(incident.ranks)} {stay} with {names(incident.leavers)}"
    joiners = names(incident.joiners) or "nobody"
    return f"{ranks_in_words(incident.ranks)}: {names(incident.leavers)} -> {joiners}"


def cost(incident: Incident) -> str:
    if incident.downtime_s is None:
        goes_on = "goes on" if incident.outcome == "open" else "went on"
        aside = f", training {goes_on}" if incident.undecided else ""
        return f"{incident.outcome}{aside}: {incident.reason}"
    normal = incident.normal_step_s
    less = f"less one step of {duration(normal)}" if normal is not None else "a step included"
    return (
        f"downtime {duration(incident.downtime_s)} since {incident.t0_from} ({less}),"
        f" lost steps: {incident.lost_steps if incident.lost_steps is not None else 'not known'}"
    )


def milestones(incident: Incident) -> Iterator[Milestone]:
    """What was reached, in the order of time."""
    found = [Milestone(incident.t0_from.replace("fault.injected", "fault"), 0.0)]
    if incident.failures and incident.t0_from == "fault.injected":
        found.append(Milestone("first evidence", incident.failures[0].first_evidence_s))
    if incident.detected_s is not None:
        found.append(Milestone("detected", incident.detected_s))
    *earlier, last = incident.migrations
    for migration in earlier[-MARKED_PLANS:]:
        if migration.planned_s is not None:
            found.append(Milestone(f"planned g{migration.generation}", migration.planned_s))
        if migration.aborted_s is not None:
            found.append(Milestone(f"aborted g{migration.generation}", migration.aborted_s))
    stages = (
        (f"planned g{last.generation}" if earlier else "planned", last.planned_s),
        ("prepared", incident.migrations[0].ready_s),
        ("collected", incident.collected_s),
        ("decided", incident.prepared_s),
        ("pulled" if last.restored else "obeyed", incident.pulled_s),
        ("switched", incident.switched_s),
        ("first step", incident.first_step_s),
        ("aborted", last.aborted_s),
    )
    found += [Milestone(name, at_s) for name, at_s in stages if at_s is not None]
    if found[0].name == "plan":
        del found[0]
    yield from sorted(found, key=lambda milestone: milestone.at_s)


def _prelude(incident: Incident) -> str:
    """Of a planned switch: what was done before it, while training went on."""
    parts = []
    if incident.waited_s is not None:
        parts.append(f"planned {duration(incident.waited_s)} after the announcement")
    if incident.prepare_s is not None:
        parts.append(f"prepared in {duration(incident.prepare_s)}")
    if incident.stop_s is not None:
        parts.append(f"frozen {duration(incident.stop_s)} later, at the end of a step")
    return f"while training went on: {', '.join(parts)}" if parts else ""


def _notes(incident: Incident) -> Iterator[str]:
    last = incident.migrations[-1]
    if prelude := _prelude(incident) if incident.planned else "":
        yield prelude
    if incident.undecided:
        return
    by_s = {
        path.worker: max(abs(at_s - path.reached_s[stage]) for stage, at_s in placed.items())
        for path in last.ranks
        if (placed := last.placed_s(path))
    }
    far = [worker for worker, moved_s in by_s.items() if moved_s > CLOCK_TOLERANCE_S]
    if far:
        yield (
            f"clocks: times of {names(far)} were moved by up to {duration(max(by_s.values()))}"
            " to where the stream proves them to be"
        )
    num_given_up = len(incident.migrations) - 1
    if num_given_up > MARKED_PLANS:
        yield f"of {num_given_up} plans that were given up, the last {MARKED_PLANS} are marked"
    if not any(path.reached_s for path in last.ranks):
        yield "ranks say what they went through when the first step is committed: not known here"
