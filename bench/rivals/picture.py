"""The kills as dots, and where the time went as bars."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot
from matplotlib.ticker import LogLocator
from measure import Outcome
from table import summary


def draw(titles: Mapping[str, str], outcomes: Sequence[Outcome], path: Path) -> None:
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(15, 1.2 + 0.75 * len(titles)), sharey=True, layout="constrained"
    )
    names = list(titles)
    for y, name in enumerate(names):
        times = [x.downtime_s for x in outcomes if x.system == name and x.downtime_s is not None]
        if not times:
            continue
        left.plot(times, [y] * len(times), "o", alpha=0.45, color="C0" if ours(name) else "C1")
        median = statistics.median(times)
        left.plot([median, median], [y - 0.3, y + 0.3], color="black", linewidth=2)
        left.annotate(f"{median:.2f} s", (median, y - 0.34), ha="center", va="bottom", fontsize=9)
        bars(right, y, summary(name, outcomes)["phases_s"])
    left.set_xscale("log")
    left.xaxis.set_major_formatter("{x:g}")
    left.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    left.xaxis.set_minor_formatter("{x:g}")
    left.set_xlabel("downtime, s (log); one dot a kill, the line is the median")
    left.set_yticks(range(len(names)), [titles[name] for name in names])
    left.set_ylim(len(names) - 0.5, -0.7)
    left.grid(axis="x", alpha=0.3)
    right.set_xlabel("where the time goes: share of the medians of the phases")
    right.set_xlim(0, 1)
    figure.suptitle("A rank of four is killed: time until all four train again")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def bars(axes: "pyplot.Axes", y: float, phases: Mapping[str, float]) -> None:
    whole, begin = sum(phases.values()), 0.0
    for index, (phase, seconds) in enumerate(phases.items()):
        share = seconds / whole
        axes.barh(y, share, left=begin, height=0.55, color=f"C{index}", alpha=0.6)
        if share > 0.012 * max(len(word) for word in phase.split()):
            text = "\n".join([*wrap(phase, round(share / 0.012)), f"{seconds:.2f}"])
            axes.text(begin + share / 2, y, text, ha="center", va="center", fontsize=7)
        begin += share


def ours(name: str) -> bool:
    return name.startswith("ours")
