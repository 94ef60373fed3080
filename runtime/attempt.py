"""What one rank went through towards a generation, as spans. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from trainmover.schemas.commands import Mark
from trainmover.telemetry.spans import Span, Value, ns

UP_TO: dict[Mark, str] = {
    "collected": "frozen",
    "obeyed": "obey",
    "restored": "pull",
    "switched": "switch",
    "resumed": "resume",
    "first_step": "first step",
}
"""What a rank does until it reaches a mark."""


@dataclass(frozen=True, slots=True)
class Attempt:
    incident: str
    generation: int
    worker: str
    rank: int | None
    reached: Mapping[Mark, float]
    """In order, seconds since 1970; the first is `collected`, of a planned switch `frozen`."""
    donor: str
    """Empty: its own state was right."""
    num_bytes: int
    links: tuple[int, int, int]
    """Opened, closed, kept."""
    error: str
    gives: bool = False
    """Of a planned switch: it gave its rank away, whose other attempt is that of the joiner."""
    """Why its first step did not come; empty when it did."""


def spans_of(run: str, attempt: Attempt) -> list[Span]:
    """`rank R gN` and below it what follows one another without a gap.

    None for a worker that never learnt its rank: it did nothing but promise.
    """
    if attempt.rank is None:
        return []
    # Who was clean had nothing to pull: it was restored when it had obeyed.
    marks = [m for m in attempt.reached.items() if m[0] != "restored" or attempt.donor]
    generation = attempt.generation
    who = f"rank {attempt.rank}" + " leaver" * attempt.gives
    name = f"{who} g{generation}"
    shared: dict[str, Value] = {
        "generation": generation,
        "rank": attempt.rank,
        "worker": attempt.worker,
    }
    more: dict[Mark, dict[str, Value]] = {
        "restored": {"donor": attempt.donor, "bytes": attempt.num_bytes},
        "switched": dict(zip(("opened", "closed", "kept"), attempt.links, strict=True)),
    }
    whole = Span(
        run=run,
        incident=attempt.incident,
        name=name,
        start_ns=ns(marks[0][1]),
        end_ns=ns(marks[-1][1]),
        attributes={**shared, "reached": marks[-1][0]},
        error=attempt.error,
    )
    pieces = [
        Span(
            run=run,
            incident=attempt.incident,
            name=f"{who}: {UP_TO[mark]} g{generation}",
            parent=name,
            start_ns=ns(before_s),
            end_ns=ns(time_s),
            attributes={**shared, **more.get(mark, {})},
        )
        for (_, before_s), (mark, time_s) in pairwise(marks)
    ]
    return [whole, *pieces]
