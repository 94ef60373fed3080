"""Why an interruption went as it did: what each service said, in the order of time."""

from collections.abc import Iterator

from trainmover.cli.incidents import Incident
from trainmover.cli.migrations import Migration, Promotion
from trainmover.cli.phrases import duration, names, ranks_in_words
from trainmover.schemas.events import Restored

MAX_RANKS = 3
"""Of whom a sentence tells each; of more, how many there are."""


def reasons(incident: Incident) -> Iterator[tuple[str, float, str]]:
    """(who, seconds after `t0`, what it said); negative is before it, while training went on."""
    said = [*_of_detector(incident)]
    ready_s = -(incident.stop_s or 0.0)
    planned_s = ready_s - (incident.prepare_s or 0.0)
    for migration in incident.migrations:
        said += _of_migration(migration, planned_s, ready_s)
    yield from sorted(said, key=lambda one: one[1])


def _of_detector(incident: Incident) -> Iterator[tuple[str, float, str]]:
    for failure in incident.failures:
        text = f"{names(failure.workers)}: {failure.kind}; {failure.evidence} ({failure.reason})"
        yield "detector", failure.detected_s, text


def _of_migration(
    migration: Migration, before_s: float, ready_before_s: float
) -> Iterator[tuple[str, float, str]]:
    """`before_s`, `ready_before_s`: when it was planned, and its joiners ready, before `t0`."""
    generation, planned_s = f"generation {migration.generation}", migration.planned_s
    at_s = before_s if planned_s is None else planned_s
    yield "planner", at_s, f"{generation}: {migration.reason}"
    if migration.ready:
        joiners = names([replacement.joiner for replacement in migration.replacements])
        text = f"{joiners} set up, links open; every rank is asked to stop at the end of a step"
        at_s = ready_before_s if migration.ready_s is None else migration.ready_s
        yield "mover", at_s, f"{generation}: {text}"
    if migration.decided_s is not None:
        yield "mover", migration.decided_s, f"{generation}: {_decision(migration)}"
    if migration.switched_s is not None:
        yield "mover", migration.switched_s, f"{generation}: {_switch(migration)}"
    if migration.aborted_s is not None:
        missing = f"; missing: {names(migration.missing)}" if migration.missing else ""
        text = f"{generation} given up: {migration.abort_reason}{missing}"
        yield "mover", migration.aborted_s, text


def _decision(migration: Migration) -> str:
    parts = [f"all go on from {migration.target} committed steps"]
    if migration.setup_again:
        parts = ["no step is committed and set-up was cut: every member runs train again"]
    if migration.holding:
        parts.append(f"voted and knew no result: {ranks_in_words(migration.holding)}")
    if migration.dirty:
        parts.append(f"dirty: {ranks_in_words(migration.dirty)}")
    for source in migration.sources[:MAX_RANKS]:
        own = f", its own state from {source.extras_from}" if source.extras_from else ""
        donors = (
            f"any of {names(source.donors)}" if len(source.donors) > 1 else names(source.donors)
        )
        parts.append(f"rank {source.rank} ({source.worker}) takes its state from {donors}{own}")
    if len(migration.sources) > MAX_RANKS:
        parts.append(f"so do {len(migration.sources) - MAX_RANKS} more ranks")
    return "; ".join(parts)


def _switch(migration: Migration) -> str:
    opened, closed, kept = (sum(links[i] for links in migration.links.values()) for i in range(3))
    parts = [_promotion(one) for one in migration.promotions[:MAX_RANKS]]
    parts += [
        f"rank {one.rank} took {_size(one.num_bytes)} from {_donors(one)} in"
        f" {duration(one.seconds)}"
        for one in migration.restored[:MAX_RANKS]
    ]
    if len(migration.restored) > MAX_RANKS:
        parts.append(f"so did {len(migration.restored) - MAX_RANKS} more ranks")
    return "; ".join([*parts, f"ends of links: {opened} opened, {closed} closed, {kept} kept"])


def _promotion(one: Promotion) -> str:
    how = "went on with its parked call" if one.bound == "rebound" else "ran train"
    return f"rank {one.rank} ({one.worker}) {how} within {duration(one.setup_s)}"


def _donors(one: Restored) -> str:
    """Those that gave some of it."""
    return names(tuple(donor for donor, count in one.donors.items() if count) or (one.donor,))


def _size(num_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} bytes"
