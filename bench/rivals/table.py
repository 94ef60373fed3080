"""What the kills of a system say together, as rows of a table and as sentences."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from measure import Outcome

LIMIT_S, TIMES = 0.5, 10.0
"""What TrainMover is meant to reach: its median, and how much longer restart and defaults take."""


def summary(system: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Seconds; the median of each phase is over the kills that have it."""
    of = [x for x in outcomes if x.system == system]
    times = [x.downtime_s for x in of if x.downtime_s is not None]
    names = dict.fromkeys(name for x in of for name in x.phases)
    phases = {n: statistics.median(x.phases[n] for x in of if n in x.phases) for n in names}
    reduced = [x.reduced_s for x in of if x.reduced_s is not None]
    return {
        "kills": len(of),
        "failed": len(of) - len(times),
        "median_s": statistics.median(times) if times else None,
        "min_s": min(times, default=None),
        "max_s": max(times, default=None),
        "normal_step_s": statistics.median(x.normal_step_s for x in of) if of else None,
        "phases_s": phases,
        "reduced_s": statistics.median(reduced) if reduced else None,
    }


def table(
    titles: Mapping[str, str], found: Mapping[str, dict[str, Any]], deaths: Mapping[str, int]
) -> str:
    """Markdown."""
    head = ("system", "median s", "min", "max", "kills", "failed", "own deaths", "a step")
    lines = [(*head, "fewer ranks after", "where the time goes: medians, s")]
    for name, s in found.items():
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in s["phases_s"].items())
        numbers = (shown(s[key]) for key in ("median_s", "min_s", "max_s"))
        counts = (str(s["kills"]), str(s["failed"]), str(deaths[name]))
        steps = (shown(s["normal_step_s"]), shown(s["reduced_s"]))
        lines.append((titles[name], *numbers, *counts, *steps, phases))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    padded = [[c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f}"


def verdicts(found: Mapping[str, dict[str, Any]]) -> str:
    """What was reached and what was not, a line each; nothing about what was not measured."""
    ours = found.get("ours", {}).get("median_s")
    if ours is None:
        return ""
    lines = [f"{reached(ours < LIMIT_S)}: ours {ours:.3f} s, wanted under {LIMIT_S:g} s"]
    for rival, times in (
        ("restart", TIMES),
        ("torchft", TIMES),
        ("torchft-tuned", 1.0),
        ("torchft-spare", 1.0),
    ):
        theirs = found.get(rival, {}).get("median_s")
        if theirs is not None:
            ratio = theirs / ours
            lines.append(
                f"{reached(ratio > times)}: {rival} takes {ratio:.1f} times as long as ours, "
                f"wanted over {times:g}"
            )
    return "\n".join(lines)


def reached(yes: bool) -> str:
    return "reached" if yes else "NOT REACHED"
