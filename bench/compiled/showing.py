"""Tables, verdicts and the picture of what was measured."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot
from measuring import Move
from running import PHASES

TIMES = 1.5
"""What the first step after a promotion may take, in normal steps, at the median."""


def promotions(cases: Mapping[str, str], moves: Sequence[Move]) -> dict[str, dict[str, Any]]:
    """Case -> medians; steps by the clock of the process that was promoted."""
    found: dict[str, dict[str, Any]] = {}
    for case in cases:
        of = [move for move in moves if move.case == case]
        ratios = [move.first_block_s / move.normal_block_s for move in of]
        found[case] = {
            "promotions": len(of),
            "first_step_times": _median(ratios),
            "first_step_times_most": max(ratios, default=None),
            "first_step_cpu_times": _median(
                [move.first_block_cpu_s / move.normal_block_cpu_s for move in of]
            ),
            "first_step_s": _median([move.first_block_s for move in of]),
            "normal_step_s": _median([move.normal_block_s for move in of]),
            "graphs": [move.num_graphs for move in of],
            "set_up_s": _median([move.set_up_s for move in of]),
            "downtime_s": _median([move.downtime_s for move in of]),
        }
    return found


def promotion_table(titles: Mapping[str, str], found: Mapping[str, Mapping[str, Any]]) -> str:
    head = (
        "standby",
        "promotions",
        "first step / normal",
        "most",
        "of CPU",
        "a step s",
        "graphs compiled",
    )
    rows = [(*head, "set-up s", "downtime s")]
    for case, of in found.items():
        rows.append(
            (
                titles[case],
                str(of["promotions"]),
                _shown(of["first_step_times"]),
                _shown(of["first_step_times_most"]),
                _shown(of["first_step_cpu_times"]),
                _shown(of["normal_step_s"]),
                ", ".join(map(str, of["graphs"])),
                _shown(of["set_up_s"]),
                _shown(of["downtime_s"]),
            )
        )
    return markdown(rows)


def promotion_verdicts(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Of the warm standbys: a line each."""
    lines = []
    for case, of in found.items():
        if case.startswith("warm") and of["promotions"]:
            times, graphs = of["first_step_times"], sum(of["graphs"])
            lines.append(
                f"{_reached(times <= TIMES)}: {case}: the first step takes {times:.2f} normal "
                f"ones, wanted {TIMES:g} at most"
            )
            lines.append(f"{_reached(graphs == 0)}: {case}: {graphs} graphs compiled, wanted none")
    return "\n".join(lines)


def breakdown(cases: Mapping[str, str], moves: Sequence[Move]) -> dict[str, dict[str, Any]]:
    """Case -> median downtime and medians of its phases, in seconds."""
    found: dict[str, dict[str, Any]] = {}
    for case in cases:
        of = [move for move in moves if move.case == case]
        found[case] = {
            "moves": len(of),
            "downtime_s": _median([move.downtime_s for move in of]),
            "downtimes_s": [move.downtime_s for move in of],
            "normal_step_s": _median([move.normal_step_s for move in of]),
            "phases_s": {
                phase: statistics.median(move.phases.get(phase, 0.0) for move in of)
                for phase in PHASES
                if of
            },
        }
    return found


def breakdown_table(titles: Mapping[str, str], found: Mapping[str, Mapping[str, Any]]) -> str:
    rows: list[tuple[str, ...]] = [
        ("what is used", "downtime s", "least", "most", "moves", *PHASES)
    ]
    for case, of in found.items():
        times, phases = of["downtimes_s"], of["phases_s"]
        rows.append(
            (
                titles[case],
                _shown(of["downtime_s"]),
                _shown(min(times, default=None)),
                _shown(max(times, default=None)),
                str(of["moves"]),
                *(_shown(phases.get(phase)) for phase in PHASES),
            )
        )
    return markdown(rows)


def draw(titles: Mapping[str, str], found: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """A bar for each case: all in seconds, then the short ones again on their own axis."""
    shown = {case: of for case, of in found.items() if of["moves"]}
    if not shown:
        return
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(15, 1.6 + 0.62 * len(shown)), sharey=True, layout="constrained"
    )
    longest = max(of["downtime_s"] for of in shown.values())
    for y, of in enumerate(shown.values()):
        for axes in (left, right):
            begin = 0.0
            for index, phase in enumerate(PHASES):
                seconds = max(0.0, of["phases_s"][phase])
                label = phase if y == 0 and axes is left else None
                axes.barh(y, seconds, 0.6, begin, color=f"C{index}", alpha=0.75, label=label)
                begin += seconds
            axes.annotate(
                f" {of['downtime_s']:.2f} s", (begin, y), va="center", fontsize=9, clip_on=True
            )
    left.set_xlim(0, longest * 1.15)
    right.set_xlim(0, 1.3 * sorted(of["downtime_s"] for of in shown.values())[:2][-1])
    left.set_yticks(range(len(shown)), [titles[case] for case in shown])
    left.invert_yaxis()
    left.set_xlabel("downtime, s: medians by phase; at the bars the median of the whole")
    right.set_xlabel("the same from 0 s, close")
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(PHASES), fontsize=9)
    figure.suptitle("A rank with a compiled model gets a new process")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    padded = [[c.ljust(w) for c, w in zip(row, widths, strict=True)] for row in rows]
    padded.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(row)} |" for row in padded)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value >= 10 else f"{value:.2f}"


def _reached(yes: bool) -> str:
    return "reached" if yes else "NOT REACHED"
