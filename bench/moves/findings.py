"""What the moves, the stretches and the periods say together: numbers, tables and sentences."""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from moving import Move
from stretches import Period, Stretch, effective
from table import reached

BEYOND_RAW_S, AIM_S = 0.15, 0.05
"""Of a move, beyond what the machine itself needs for the bytes."""
ALIKE = 1.2
"""The most and the least of what one, two and three ranks cost beyond that."""
BESIDE = 1.03
"""Of a step, while a joiner prepares on another core."""
EFFECTIVE = 0.97
DRAWS = 2000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found:
    """A figure with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def shown(self, digits: int = 3) -> str:
        return f"{self.value:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def found(of: Sequence[T], statistic: Callable[[Sequence[T]], float]) -> Found:
    """Of all of it, and how far it goes when it is drawn again and again."""
    draw = random.Random(0)
    again = sorted(statistic(draw.choices(of, k=len(of))) for _ in range(DRAWS))
    beyond = DRAWS // 40
    return Found(statistic(of), again[beyond], again[-beyond - 1])


@dataclass(frozen=True, slots=True)
class Beside:
    """Steps while a joiner prepares, and three stretches before it, each next to the one that it
    is compared with."""

    prepare: Stretch
    before: Stretch
    """Of the second that ends when the move is announced: also what it would be for `prepare`."""
    again: Stretch
    """Ahead of that; undisturbed like it, so what a ratio of equals looks like."""
    alone: Stretch
    """Ahead of that: the same set-up runs on the other core in a process outside the job."""

    def ratios(self, what: str) -> dict[str, float]:
        """`what` is wall_s or cpu_s."""
        prepare, before, again, alone = (
            getattr(s, what) for s in (self.prepare, self.before, self.again, self.alone)
        )
        return {"prepare": prepare / before, "equals": again / before, "alone": alone / again}


TITLES = {
    "prepare": "a joiner prepares / nothing does",
    "equals": "nothing does / nothing does",
    "alone": "the set-up outside the job / nothing does",
}


def of_moves(moves: Sequence[Move]) -> dict[str, Any]:
    """By the number of ranks that moved at once. Seconds."""
    sizes: dict[int, list[Move]] = {}
    for move in moves:
        sizes.setdefault(len(move.ranks), []).append(move)
    return {
        size: {
            "moves": len(of),
            "downtime": found([m.downtime_s for m in of], statistics.median),
            "raw": found([m.raw_s or 0.0 for m in of], statistics.median),
            "beyond": found([m.downtime_s - (m.raw_s or 0.0) for m in of], statistics.median),
            "normal_step_s": statistics.median(m.normal_step_s for m in of),
            "megabytes": statistics.median(m.num_bytes for m in of) / 1e6,
            "phases": {
                name: statistics.median(m.phases.get(name, 0.0) for m in of)
                for name in of[0].phases
            },
        }
        for size, of in sorted(sizes.items())
    }


def of_prepares(turns: Sequence[Beside]) -> dict[str, dict[str, Found]]:
    """What is measured -> which ratio -> its median."""
    return {
        what: {
            name: found([turn.ratios(what)[name] for turn in turns], statistics.median)
            for name in TITLES
        }
        for what in ("cpu_s", "wall_s")
        if turns
    }


def of_endurance(systems: Mapping[str, Sequence[Period]]) -> dict[str, Any]:
    return {
        system: {
            "interruptions": len(of),
            "seconds": sum(p.wall_s for p in of),
            "steps": sum(p.steps for p in of),
            "undisturbed_step_s": statistics.median(p.undisturbed_s for p in of),
            "effective": found(of, effective),
        }
        for system, of in systems.items()
        if of
    }


def tables(
    moved: Mapping[int, Mapping[str, Any]],
    beside: Mapping[str, Mapping[str, Found]],
    endured: Mapping[str, Mapping[str, Any]],
) -> str:
    """Markdown; what was not measured has no table."""
    parts = []
    if moved:
        head = ("ranks at once", "moves", "downtime, s", "raw copy, s", "beyond it, s", "a step")
        rows = [(*head, "where the time went: medians, s")]
        for size, of in moved.items():
            figures = (of[name].shown() for name in ("downtime", "raw", "beyond"))
            phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in of["phases"].items())
            counts = (str(size), str(of["moves"]))
            rows.append((*counts, *figures, f"{of['normal_step_s']:.3f}", phases))
        parts.append(markdown(rows))
    if beside:
        rows = [("a step", "CPU time", "wall time")]
        for name, title in TITLES.items():
            rows.append((title, *(beside[what][name].shown() for what in ("cpu_s", "wall_s"))))
        parts.append(markdown(rows))
    if endured:
        head = ("system", "interruptions", "seconds", "steps", "a step undisturbed")
        rows = [(*head, "effective training time")]
        for system, of in endured.items():
            numbers = (str(of["interruptions"]), f"{of['seconds']:.0f}", str(of["steps"]))
            step = f"{of['undisturbed_step_s']:.3f}"
            rows.append((system, *numbers, step, of["effective"].shown()))
        parts.append(markdown(rows))
    return "\n\n".join(parts)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    padded = [[c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def verdicts(
    moved: Mapping[int, Mapping[str, Any]],
    beside: Mapping[str, Mapping[str, Found]],
    endured: Mapping[str, Mapping[str, Any]],
) -> str:
    """What was reached and what was not, a line each; nothing about what was not measured."""
    lines = []
    if 1 in moved:
        downtime, raw = moved[1]["downtime"].value, moved[1]["raw"].value
        limit_s = BEYOND_RAW_S + raw
        lines.append(
            f"{reached(downtime < limit_s)}: a rank moves in {downtime:.3f} s, wanted under "
            f"{limit_s:.3f} s: {BEYOND_RAW_S:g} s and what a raw copy takes "
            f"({reached(downtime < AIM_S + raw)}: the aim of {AIM_S:g} s and that)"
        )
    if len(moved) > 1:
        beyond = [of["beyond"].value for of in moved.values()]
        alike = min(beyond) > 0 and max(beyond) <= ALIKE * min(beyond)
        costs = ", ".join(
            f"{size} at once {of['beyond'].value:.3f} s" for size, of in moved.items()
        )
        lines.append(f"{reached(alike)}: beyond a raw copy {costs}, wanted within {ALIKE - 1:.0%}")
    for what, name in (("cpu_s", "CPU"), ("wall_s", "wall")):
        if beside:
            ratio, equals = (beside[what][of].value for of in ("prepare", "equals"))
            lines.append(
                f"{reached(ratio < BESIDE)}: while a joiner prepares a step takes {ratio:.3f} of "
                f"its {name} time, wanted under {BESIDE:g} (equals: {equals:.3f})"
            )
    if "ours" in endured:
        ours = endured["ours"]["effective"].value
        beside_it = "".join(
            f" ({system}: {of['effective'].value:.3f})"
            for system, of in endured.items()
            if system != "ours"
        )
        lines.append(
            f"{reached(ours > EFFECTIVE)}: effective training time {ours:.3f}, wanted over "
            f"{EFFECTIVE:g}{beside_it}"
        )
    return "\n".join(lines)
