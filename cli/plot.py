"""Timelines of incidents as a PNG. Needs matplotlib, the extra `plots`."""

import textwrap
from pathlib import Path
from typing import Any

from trainmover.cli.axis import lanes, ticks
from trainmover.cli.chart import chart
from trainmover.cli.incidents import Incident
from trainmover.cli.phrases import duration, printable, when
from trainmover.cli.reasons import reasons
from trainmover.cli.report import Report
from trainmover.cli.rows import COLOURS, IDLE, Kind

MAX_INCIDENTS = 12
MAX_RANKS = 24
WIDTH, ROW, LANE, LINE = 12.0, 0.27, 0.2, 0.2
"""Inches."""
LEFT, RIGHT, HEAD, FOOT = 2.4, 1.3, 0.85, 0.75
"""Inches around the rows of one incident."""
LETTER = 0.075
"""Inches a letter takes on average."""
LONGEST_LABEL, LONGEST_LINE = 30, 150
INK, SOFT, GRID = "#0f172a", "#64748b", "#e2e8f0"


class NoMatplotlib(RuntimeError):
    """The extra `plots` is not installed."""


def plot(report: Report, path: Path) -> None:
    """Write the PNG: the longest incidents if there are many, in the order of time.

    Raises NoMatplotlib, OSError.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise NoMatplotlib(
            "a PNG needs matplotlib: pip install 'trainmover[plots]', or take --html FILE"
        ) from None
    longest = sorted(report.incidents, key=lambda incident: -incident.last_s)[:MAX_INCIDENTS]
    shown = [incident for incident in report.incidents if incident in longest]
    panels = [_Panel(incident) for incident in shown]
    height = 0.9 + sum(panel.height for panel in panels)
    figure = Figure(figsize=(WIDTH, height), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.02, 1 - 0.35 / height, _short(report.job, 90), size=14, weight="bold", color=INK)
    figure.text(0.02, 1 - 0.62 / height, _about(report, len(shown)), size=9, color=SOFT)
    top = height - 0.8
    for panel in panels:
        panel.draw(figure, top, height)
        top -= panel.height
    figure.savefig(path, format="png")


def _about(report: Report, num_shown: int) -> str:
    parts = [f"run {report.run}", f"layout {report.layout}"]
    if report.goodput is not None:
        parts.append(f"goodput {report.goodput:.2%}")
    num = len(report.incidents)
    parts.append(f"{num} incidents" if num != 1 else "1 incident")
    if num_shown < num:
        parts.append(f"the {num_shown} longest")
    return _short(", ".join(parts), LONGEST_LINE)


class _Panel:
    """One incident: title, flags of what was reached, rows, reasons."""

    def __init__(self, incident: Incident) -> None:
        self.chart = chart(incident, MAX_RANKS)
        self.lines = [
            line
            for text in (
                *self.chart.notes,
                *(f"{who}, {when(at)}: {text}" for who, at, text in reasons(incident)),
            )
            for line in textwrap.wrap(printable(text), LONGEST_LINE, subsequent_indent="      ")
        ]
        self.bars = WIDTH - LEFT - RIGHT
        scale = self.bars / self.chart.end_s
        self.flags = [f"{m.name} {duration(m.at_s)}" for m in self.chart.milestones]
        self.levels = lanes(
            [m.at_s * scale for m in self.chart.milestones],
            [LETTER * len(flag) for flag in self.flags],
            gap=0.1,
        )
        self.above = HEAD + LANE * (max(self.levels, default=0) + 1)
        self.rows = ROW * len(self.chart.rows)
        self.height = self.above + self.rows + FOOT + LINE * len(self.lines) + 0.3

    def draw(self, figure: Any, top: float, height: float) -> None:
        """`top`: inches above the figure's lower edge."""
        title = (0.02, (top - 0.3) / height)
        figure.text(*title, _short(self.chart.title, 110), size=11, weight="bold", color=INK)
        cost = (0.02, (top - 0.52) / height)
        figure.text(*cost, _short(self.chart.cost, LONGEST_LINE), size=9, color=SOFT)
        bottom = top - self.above - self.rows
        axes = figure.add_axes(
            (LEFT / WIDTH, bottom / height, self.bars / WIDTH, self.rows / height)
        )
        self._axes(axes)
        self._bars(axes)
        self._flags(axes)
        self._legend(figure, bottom - 0.52, height)
        for i, line in enumerate(self.lines):
            at = (bottom - FOOT - LINE * (i + 0.5)) / height
            figure.text(0.02, at, _short(line, LONGEST_LINE), size=8.5, color=INK)

    def _axes(self, axes: Any) -> None:
        chart = self.chart
        places = ticks(chart.end_s, 8)
        axes.set(xlim=(0, chart.end_s), ylim=(len(chart.rows) - 0.5, -0.5))
        axes.set_xticks([at_s for at_s, _ in places], [label for _, label in places])
        labels = [_end(f"{row.name}  {row.detail}".strip()) for row in chart.rows]
        axes.set_yticks(range(len(labels)), labels)
        axes.tick_params(length=0, labelsize=8.5, labelcolor=INK)
        axes.grid(axis="x", color=GRID)
        axes.set_axisbelow(True)
        for side in axes.spines.values():
            side.set_visible(False)

    def _bars(self, axes: Any) -> None:
        end_s = self.chart.end_s
        for y, row in enumerate(self.chart.rows):
            if row.joined:
                axes.axhspan(y - 0.5, y + 0.5, color="#fef6e7", zorder=0)
            for span in sorted(row.spans, key=lambda span: span.kind not in IDLE):
                length = max(span.end_s - span.start_s, end_s / 400)
                axes.barh(y, length, 0.7, left=span.start_s, color=COLOURS[span.kind], zorder=2)
                self._inside(axes, y, span.kind, span.start_s, span.end_s - span.start_s)
            if row.spans:
                text = duration(row.spans[-1].end_s)
                axes.text(end_s * 1.01, y, text, size=8, va="center", color=SOFT)

    def _inside(self, axes: Any, y: int, kind: Kind, start_s: float, length_s: float) -> None:
        room = self.bars * length_s / self.chart.end_s - 0.1
        texts = (f"{kind} {duration(length_s)}", duration(length_s))
        fitting = [text for text in texts if LETTER * len(text) < room]
        if fitting and kind is not Kind.WAIT:
            colour = INK if kind in IDLE else "white"
            at = start_s + 0.05 * self.chart.end_s / self.bars
            axes.text(at, y, fitting[0], size=7.5, va="center", color=colour, zorder=3)

    def _flags(self, axes: Any) -> None:
        for milestone, text, lane in zip(
            self.chart.milestones, self.flags, self.levels, strict=True
        ):
            y = -0.5 - (lane * LANE + 0.1) / ROW
            line = ([milestone.at_s] * 2, [len(self.chart.rows) - 0.5, y - 0.1 / ROW])
            axes.plot(*line, color=SOFT, linewidth=0.8, linestyle=":", clip_on=False, zorder=4)
            at = milestone.at_s + 0.04 * self.chart.end_s / self.bars
            axes.text(at, y, text, size=8, va="center", color=INK, clip_on=False)

    def _legend(self, figure: Any, at: float, height: float) -> None:
        from matplotlib.patches import Rectangle

        kinds = self.chart.kinds
        figure.legend(
            handles=[Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in kinds],
            labels=[str(kind) for kind in kinds],
            loc="center left",
            bbox_to_anchor=(0.012, at / height),
            ncols=len(kinds),
            frameon=False,
            fontsize=8,
            handlelength=1,
            handleheight=1,
            columnspacing=1.4,
        )


def _short(text: str, longest: int) -> str:
    text = _plain(text)
    return text if len(text) <= longest else text[: longest - 3] + "..."


def _end(text: str) -> str:
    text = _plain(text)
    return text if len(text) <= LONGEST_LABEL else text[:8] + "..." + text[11 - LONGEST_LABEL :]


def _plain(text: str) -> str:
    """What matplotlib would take for a formula is none."""
    return printable(text).replace("$", r"\$")
