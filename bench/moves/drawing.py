"""Where the time of a move goes, what a joiner costs beside it, and endurance, in one picture."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from findings import TITLES, Found
from stretches import Period

OURS, RIVAL = "#15803d", "#94a3b8"
PHASES = ("#14532d", "#15803d", "#22c55e", "#86efac", "#0e7490", "#22d3ee", "#a5f3fc")


def draw(
    moved: Mapping[int, Mapping[str, Any]],
    beside: Mapping[str, Mapping[str, Found]],
    endured: Mapping[str, Mapping[str, Any]],
    periods: Mapping[str, Sequence[Period]],
    path: Path,
) -> None:
    """A panel for each part that was measured."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError:
        print("planned: no picture: pip install 'trainmover[plots]'", file=sys.stderr)
        return
    panels = [
        (panel, arguments)
        for panel, arguments in (
            (downtimes, (moved,)),
            (ratios, (beside,)),
            (endurance, (endured, periods)),
        )
        if arguments[0]
    ]
    if not panels:
        return
    figure, all_axes = pyplot.subplots(
        1, len(panels), figsize=(5.4 * len(panels), 3.6), layout="constrained", squeeze=False
    )
    for (panel, arguments), axes in zip(panels, all_axes[0], strict=True):
        panel(axes, *arguments)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def downtimes(axes: Any, moved: Mapping[int, Mapping[str, Any]]) -> None:
    """The phases of a move as one bar, a step less; the raw copy as one below it."""
    names = dict.fromkeys(name for of in moved.values() for name in of["phases"])
    colors = dict(zip(names, PHASES, strict=False))
    for row, of in enumerate(moved.values()):
        left = 0.0
        for name, seconds in of["phases"].items():
            label = name if row == 0 else None
            axes.barh(row - 0.15, seconds, 0.4, left, color=colors[name], label=label)
            left += seconds
        axes.annotate(
            f"{left:.2f}: {of['downtime'].value:.2f} and a step",
            (left, row - 0.15), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
        raw = of["raw"].value
        axes.barh(row + 0.2, raw, 0.2, color=RIVAL, label="raw copy" if row == 0 else None)
        axes.annotate(
            f"{raw:.2f}", (raw, row + 0.2),
            xytext=(4, 0), textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
    axes.set_yticks(range(len(moved)), [f"{size} of 4" for size in moved])
    axes.invert_yaxis()
    axes.margins(x=0.4)
    axes.set_xlabel("s from the last step before a move to the first after it, medians")
    axes.set_title("Ranks that move at once", fontsize=10)
    axes.legend(fontsize=7, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def ratios(axes: Any, beside: Mapping[str, Mapping[str, Found]]) -> None:
    rows = [(name, what) for name in TITLES for what in beside]
    for at, (name, what) in enumerate(rows):
        of, color = beside[what][name], OURS if name == "prepare" else RIVAL
        axes.plot([of.low, of.high], [at, at], color=color, linewidth=4, solid_capstyle="round")
        axes.plot([of.value], [at], "o", color=color, markersize=8)
        axes.annotate(f"{of.value:.3f}", (of.value, at - 0.22), ha="center", fontsize=8)
    labels = [f"{TITLES[name].replace(' / ', chr(10) + '/ ')}, {what[:-2]}" for name, what in rows]
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.set_ylim(len(rows) - 0.5, -0.8)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel("ratio of a step; median and 95 % interval")
    axes.set_title("The others meanwhile", fontsize=10)


def endurance(
    axes: Any, endured: Mapping[str, Mapping[str, Any]], periods: Mapping[str, Sequence[Period]]
) -> None:
    """Training that the committed steps are worth, over the wall time."""
    for system, color in (("ours", OURS), ("restart", RIVAL)):
        x, y = [0.0], [0.0]
        for period in periods.get(system, ()):
            x.append(x[-1] + period.wall_s)
            y.append(y[-1] + period.steps * period.undisturbed_s)
        if len(x) > 1:
            title = {"ours": "moves", "restart": "all ranks restart"}[system]
            label = f"{title}: {endured[system]['effective'].value:.3f}"
            axes.plot(x, y, color=color, marker="o", markersize=4, linewidth=2, label=label)
    end = max(sum(p.wall_s for p in of) for of in periods.values())
    axes.plot([0, end], [0, end], color="black", linewidth=0.8, linestyle=":", label="undisturbed")
    axes.set_xlabel("s of wall time")
    axes.set_ylabel("s of training")
    axes.legend(fontsize=8, frameon=False)
    axes.set_title("An interruption in each period", fontsize=10)
