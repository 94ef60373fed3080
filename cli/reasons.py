"""Why an interruption went as it did: what each service said, in the order of time."""

from collections.abc import Iterator

from trainmover.cli.incidents import Incident
from trainmover.cli.migrations import Migration
from trainmover.cli.phrases import duration, names, ranks_in_words

MAX_RANKS = 3
"""Of whom a sentence tells each; of more, how many there are."""


def reasons(incident: Incident) -> Iterator[tuple[str, float, str]]:
    """(who, seconds after `t0`, what it said)."""
    said = [*_of_detector(incident)]
    for migration in incident.migrations:
        said += _of_migration(migration)
    yield from sorted(said, key=lambda one: one[1])


def _of_detector(incident: Incident) -> Iterator[tuple[str, float, str]]:
    for failure in incident.failures:
        text = f"{names(failure.workers)}: {failure.kind}; {failure.evidence} ({failure.reason})"
        yield "detector", failure.detected_s, text


def _of_migration(migration: Migration) -> Iterator[tuple[str, float, str]]:
    generation = f"generation {migration.generation}"
    yield "planner", migration.planned_s, f"{generation}: {migration.reason}"
    if migration.ready_s is not None:
        joiners = names([replacement.joiner for replacement in migration.replacements])
        text = f"{joiners} set up, links open; every rank is asked to stop at the end of a step"
        yield "mover", migration.ready_s, f"{generation}: {text}"
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
            f"one of {names(source.donors)}" if len(source.donors) > 1 else names(source.donors)
        )
        parts.append(f"rank {source.rank} ({source.worker}) takes its state from {donors}{own}")
    if len(migration.sources) > MAX_RANKS:
        parts.append(f"so do {len(migration.sources) - MAX_RANKS} more ranks")
    return "; ".join(parts)


def _switch(migration: Migration) -> str:
    opened, closed, kept = (sum(links[i] for links in migration.links.values()) for i in range(3))
    parts = [
        f"rank {one.rank} took {_size(one.num_bytes)} from {one.donor} in {duration(one.seconds)}"
        for one in migration.restored[:MAX_RANKS]
    ]
    if len(migration.restored) > MAX_RANKS:
        parts.append(f"so did {len(migration.restored) - MAX_RANKS} more ranks")
    return "; ".join([*parts, f"ends of links: {opened} opened, {closed} closed, {kept} kept"])


def _size(num_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} bytes"
