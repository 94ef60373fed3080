"""An incident as rows of spans over one axis of time: what every picture of it is drawn from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from trainmover.cli.incidents import Incident
from trainmover.cli.migrations import Migration, RankPath
from trainmover.cli.phrases import duration, names, ranks_in_words

CLOCK_TOLERANCE_S = 0.05
"""A worker's time that is moved by more than this is said to be."""
MARKED_PLANS = 3
"""Of those that were given up: the latest."""
SHORTEST_S = 0.01
"""An axis is at least so long."""


class Kind(StrEnum):
    """What an actor does; the words stand in legends."""

    DETECT = "detect"
    PLAN = "plan"
    COLLECT = "collect"
    CUT = "step cut off"
    LOST = "no worker"
    WAIT = "wait"
    OBEY = "undo or apply"
    SET_UP = "set up"
    PULL = "pull state"
    SWITCH = "switch links"
    STEP = "first step"


COLOURS = {
    Kind.DETECT: "#4f46e5",
    Kind.PLAN: "#7c3aed",
    Kind.COLLECT: "#0e7490",
    Kind.CUT: "#94a3b8",
    Kind.LOST: "#ef9a9a",
    Kind.WAIT: "#e2e8f0",
    Kind.OBEY: "#2563eb",
    Kind.SET_UP: "#b45309",
    Kind.PULL: "#0f766e",
    Kind.SWITCH: "#be185d",
    Kind.STEP: "#15803d",
}
IDLE = (Kind.CUT, Kind.LOST, Kind.WAIT)


@dataclass(frozen=True, slots=True)
class Span:
    kind: Kind
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """An actor. `detail`: its worker, or which ranks it stands for."""

    name: str
    detail: str
    spans: tuple[Span, ...]
    joined: bool = False


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
    """`max_ranks` rows: joiners, their neighbours and the slowest; the rest in one more row."""
    rows = (*_service_rows(incident), *_rank_rows(incident, max_ranks))
    return Chart(
        title=title(incident),
        cost=cost(incident),
        end_s=max(SHORTEST_S, incident.last_s),
        rows=rows,
        milestones=tuple(milestones(incident)),
        notes=tuple(_notes(incident)),
    )


def title(incident: Incident) -> str:
    return f"incident {incident.incident} ({incident.kind}, {incident.outcome}): {moved(incident)}"


def moved(incident: Incident) -> str:
    """Who lost which rank to whom."""
    if not incident.leavers:
        return "the same workers, linked again"
    joiners = names(incident.joiners) or "nobody"
    return f"{ranks_in_words(incident.ranks)}: {names(incident.leavers)} -> {joiners}"


def cost(incident: Incident) -> str:
    if incident.downtime_s is None:
        return f"{incident.outcome}: {incident.reason}"
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
        found.append(Milestone(f"planned g{migration.generation}", migration.planned_s))
        if migration.aborted_s is not None:
            found.append(Milestone(f"aborted g{migration.generation}", migration.aborted_s))
    stages = (
        (f"planned g{last.generation}" if earlier else "planned", last.planned_s),
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


def _notes(incident: Incident) -> Iterator[str]:
    last = incident.migrations[-1]
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


# ---- rows


def _service_rows(incident: Incident) -> Iterator[Row]:
    detector = tuple(
        Span(Kind.DETECT, failure.first_evidence_s, failure.detected_s)
        for failure in incident.failures
    )
    if detector:
        yield Row("detector", "", detector)
    yield Row("planner", "", tuple(_planning(incident)))
    spans = [span for migration in incident.migrations for span in _moving(migration)]
    yield Row("mover", "", tuple(spans))


def _planning(incident: Incident) -> Iterator[Span]:
    """Of each plan since what called for it."""
    causes = [0.0, *(failure.detected_s for failure in incident.failures)]
    for migration in incident.migrations:
        since = max(at for at in causes if at <= migration.planned_s)
        yield Span(Kind.PLAN, since, migration.planned_s)
        causes.append(migration.last_s)


def _moving(migration: Migration) -> Iterator[Span]:
    at_s = migration.planned_s
    obey = Kind.SET_UP if any(path.joined for path in migration.ranks) else Kind.OBEY
    for kind, until_s in (
        (Kind.COLLECT, migration.decided_s),
        (obey, migration.all_reached_s("obeyed")),
        (Kind.PULL, migration.all_reached_s("restored")),
        (Kind.SWITCH, migration.switched_s),
        (Kind.STEP, migration.completed_s),
    ):
        if until_s is None:
            if migration.aborted_s is not None:
                yield Span(kind, at_s, migration.aborted_s)
                return
            continue
        if until_s > at_s:
            yield Span(kind, at_s, until_s)
        at_s = max(at_s, until_s)


def _rank_rows(incident: Incident, max_ranks: int) -> Iterator[Row]:
    last = incident.migrations[-1]
    shown, rest = _chosen(last.ranks, max_ranks)
    leavers: dict[int, str] = {}
    for replacement in (x for migration in incident.migrations for x in migration.replacements):
        leavers.setdefault(replacement.rank, replacement.leaver)
    for path in shown:
        was = f" (was {leavers[path.rank]})" if path.rank in leavers else ""
        spans = tuple(_going(path, incident))
        yield Row(f"rank {path.rank}", path.worker + was, spans, path.joined)
    if rest:
        latest = _latest(rest)
        spans = tuple(_going(latest, incident))
        yield Row(f"{len(rest)} others", "the latest of them", spans, latest.joined)


def _going(path: RankPath, incident: Incident) -> Iterator[Span]:
    last = incident.migrations[-1]
    reached = last.placed_s(path)
    end_s = incident.last_s
    if path.joined:
        before: tuple[tuple[Kind, float | None], ...] = ((Kind.LOST, last.planned_s),)
    else:
        before = ((Kind.CUT, reached.get("collected", end_s)),)
    course = (
        *before,
        (Kind.WAIT, last.decided_s),
        (Kind.SET_UP if path.joined else Kind.OBEY, reached.get("obeyed")),
        (Kind.PULL, reached.get("restored")),
        (Kind.WAIT, last.all_reached_s("restored")),
        (Kind.SWITCH, reached.get("switched")),
        (Kind.WAIT, reached.get("resumed")),
        (Kind.STEP, reached.get("first_step")),
    )
    at_s = 0.0
    for kind, until_s in course:
        if until_s is not None and until_s > at_s:
            yield Span(kind, at_s, until_s)
            at_s = until_s
    if not reached and path.joined and at_s < end_s:
        yield Span(Kind.WAIT, at_s, end_s)


def _chosen(paths: Sequence[RankPath], max_ranks: int) -> tuple[list[RankPath], list[RankPath]]:
    """Those to show, in the order of ranks, and the rest; never just one in the rest."""
    if len(paths) <= max_ranks:
        return sorted(paths, key=lambda path: path.rank), []
    joined = {path.rank for path in paths if path.joined}
    near = {(rank + by) % len(paths) for rank in joined for by in (-1, 1)}

    def first(path: RankPath) -> tuple[bool, bool, float]:
        slowest_s = max(path.reached_s.values(), default=0.0)
        return not path.joined, path.rank not in near, -slowest_s

    ordered = sorted(paths, key=first)
    shown, rest = ordered[: max_ranks - 1], ordered[max_ranks - 1 :]
    return sorted(shown, key=lambda path: path.rank), sorted(rest, key=lambda path: path.rank)


def _latest(paths: Sequence[RankPath]) -> RankPath:
    """One that stands for all: each stage when the last of them reached it."""
    stages = dict.fromkeys(stage for path in paths for stage in path.reached_s)
    reached = {s: max(p.reached_s[s] for p in paths if s in p.reached_s) for s in stages}
    joined = all(path.joined for path in paths)
    return RankPath(rank=paths[0].rank, worker="", joined=joined, reached_s=reached)
