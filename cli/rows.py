"""What each actor did in an interruption: services and ranks, in spans of time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from trainmover.cli.incidents import Incident
from trainmover.cli.migrations import Migration, RankPath


class Kind(StrEnum):
    """What an actor does; the words stand in legends."""

    DETECT = "detect"
    PLAN = "plan"
    PREPARE = "prepare"
    FREEZE = "frozen"
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
    Kind.PREPARE: "#a16207",
    Kind.FREEZE: "#7dd3fc",
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
IDLE = (Kind.FREEZE, Kind.CUT, Kind.LOST, Kind.WAIT)


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


def rows(incident: Incident, max_ranks: int) -> Iterator[Row]:
    """Of services, then `max_ranks` of ranks: joiners, their neighbours and the slowest; the rest
    in one more row."""
    yield from _service_rows(incident)
    yield from _rank_rows(incident, max_ranks)


def _service_rows(incident: Incident) -> Iterator[Row]:
    detector = tuple(
        Span(Kind.DETECT, failure.first_evidence_s, failure.detected_s)
        for failure in incident.failures
    )
    if detector:
        yield Row("detector", "", detector)
    if planning := tuple(_planning(incident)):
        yield Row("planner", "", planning)
    overtaken = [*(migration.planned_s for migration in incident.migrations[1:]), None]
    courses = zip(incident.migrations, overtaken, strict=True)
    spans = [span for migration, until_s in courses for span in _moving(migration, until_s)]
    yield Row("mover", "", tuple(spans))


def _planning(incident: Incident) -> Iterator[Span]:
    """Of each plan since what called for it."""
    causes = [0.0, *(failure.detected_s for failure in incident.failures)]
    for migration in incident.migrations:
        if migration.kind != "planned":
            since = max(at for at in causes if at <= migration.start_s)
            yield Span(Kind.PLAN, since, migration.start_s)
        causes.append(migration.last_s)


def _moving(migration: Migration, overtaken_s: float | None) -> Iterator[Span]:
    """`overtaken_s`: when the next plan came, if one did."""
    at_s = migration.start_s
    given_up_s = overtaken_s if migration.aborted_s is None else migration.aborted_s
    obey = Kind.SET_UP if any(path.joined for path in migration.ranks) else Kind.OBEY
    course: tuple[tuple[Kind, float | None], ...] = (
        (Kind.COLLECT, migration.decided_s),
        (obey, migration.all_reached_s("obeyed")),
    )
    if migration.kind == "planned":
        course = (
            (Kind.PREPARE, migration.ready_s),
            (Kind.FREEZE, migration.decided_s),
            (Kind.COLLECT, migration.all_reached_s("obeyed")),
        )
    for kind, until_s in (
        *course,
        (Kind.PULL, migration.all_reached_s("restored")),
        (Kind.SWITCH, migration.switched_s),
        (Kind.STEP, migration.completed_s),
    ):
        if until_s is None:
            if given_up_s is not None:
                yield Span(kind, at_s, max(at_s, given_up_s))
                return
            continue
        if until_s > at_s:
            yield Span(kind, at_s, until_s)
        at_s = max(at_s, until_s)


def _rank_rows(incident: Incident, max_ranks: int) -> Iterator[Row]:
    if incident.undecided:
        return  # they train
    last = incident.migrations[-1]
    shown, rest = _chosen(last.ranks, max_ranks)
    leavers: dict[int, str] = {}
    for replacement in (x for migration in incident.migrations for x in migration.replacements):
        leavers.setdefault(replacement.rank, replacement.leaver)
    for path in shown:
        leaver = leavers.get(path.rank, path.worker)
        was = f" (was {leaver})" if leaver != path.worker else ""
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
    collected_s, obeyed_s = reached.get("collected", end_s), reached.get("obeyed")
    before: tuple[tuple[Kind, float | None], ...]
    if last.kind == "planned":
        before = ((Kind.WAIT if path.joined else Kind.FREEZE, collected_s), (Kind.WAIT, obeyed_s))
    elif path.joined:
        before = (
            (Kind.LOST, last.planned_s),
            (Kind.WAIT, last.decided_s),
            (Kind.SET_UP, obeyed_s),
        )
    else:
        stood = Kind.FREEZE if "frozen" in path.reached_s else Kind.CUT
        before = ((stood, collected_s), (Kind.WAIT, last.decided_s), (Kind.OBEY, obeyed_s))
    course = (
        *before,
        (Kind.PULL, reached.get("restored")),
        (Kind.WAIT, last.all_reached_s("restored")),
        (Kind.SWITCH, reached.get("switched")),
        (Kind.WAIT, reached.get("resumed")),
        (Kind.STEP, reached.get("first_step")),
    )
    at_s = max(0.0, reached.get("frozen", 0.0))
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
