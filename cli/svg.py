"""An incident as SVG, to stand inside a page that has the styles of `STYLE`."""

import html
from collections.abc import Iterator
from dataclasses import dataclass

from trainmover.cli.axis import lanes, ticks
from trainmover.cli.chart import Chart
from trainmover.cli.phrases import duration, printable
from trainmover.cli.rows import COLOURS, IDLE, Kind, Row, Span

LEFT, WIDTH, RIGHT = 250, 750, 130
"""Pixels for labels, for bars, and for the times behind them."""
ROW, BAR, LANE, AXIS = 26, 18, 16, 26
LETTER = 6.4
"""Width of a letter on average, at 11 px; a bit more than it is."""
DETAIL, LONGEST_DETAIL = 76, 24
"""Where a row's detail begins, and its letters at most."""

STYLE = """
svg { font: 11px system-ui, sans-serif; min-width: 760px; width: 100%; height: auto;
  display: block; }
svg text { fill: var(--ink); }
svg text.soft { fill: var(--soft); }
svg text.name { font-weight: 600; }
svg text.end { font-variant-numeric: tabular-nums; }
svg text.inside { fill: #fff; pointer-events: none; }
svg text.inside.idle { fill: #0f172a; }
svg .grid { stroke: var(--line); }
svg .mark { stroke: var(--soft); stroke-dasharray: 2 3; }
svg .joined { fill: var(--joined); }
svg rect.WAIT { fill: var(--wait); }
""" + "".join(
    f"svg rect.{kind.name} {{ fill: {colour}; }}\n"
    for kind, colour in COLOURS.items()
    if kind is not Kind.WAIT
)


@dataclass(frozen=True, slots=True)
class _Frame:
    chart: Chart
    top: float
    """Where the rows begin."""

    @property
    def bottom(self) -> float:
        return self.top + ROW * len(self.chart.rows)

    def x(self, at_s: float) -> float:
        return LEFT + WIDTH * at_s / self.chart.end_s


def text_of(value: str) -> str:
    """As it may stand in XML: escaped, without control characters."""
    return html.escape(printable(value))


def svg(chart: Chart) -> str:
    """One element, `<svg ...>`."""
    marks = chart.milestones
    places = [LEFT + WIDTH * mark.at_s / chart.end_s for mark in marks]
    texts = [f"{mark.name} {duration(mark.at_s)}" for mark in marks]
    levels = lanes(places, [LETTER * len(text) for text in texts], gap=8)
    frame = _Frame(chart, top=LANE * (max(levels, default=0) + 1) + 8)
    parts = [
        *_grid(frame),
        *(part for i, row in enumerate(chart.rows) for part in _row(frame, i, row)),
        *(_mark(frame, *one) for one in zip(places, texts, levels, strict=True)),
    ]
    height = frame.bottom + AXIS
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + RIGHT} {height:g}"'
        f' role="img"><title>{text_of(chart.title)}</title>{"".join(parts)}</svg>'
    )


def _grid(frame: _Frame) -> Iterator[str]:
    for at_s, label in ticks(frame.chart.end_s, 8):
        x = frame.x(at_s)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{frame.top}" y2="{frame.bottom}"/>'
        yield (
            f'<text class="soft" x="{x:.1f}" y="{frame.bottom + 16}" text-anchor="middle">'
            f"{label}</text>"
        )


def _mark(frame: _Frame, x: float, text: str, lane: int) -> str:
    y = frame.top - 8 - LANE * lane
    return (
        f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 10:g}" y2="{frame.bottom}"/>'
        f'<text x="{x + 3:.1f}" y="{y:g}">{text_of(text)}</text>'
    )


def _row(frame: _Frame, index: int, row: Row) -> Iterator[str]:
    y = frame.top + ROW * index
    middle = y + ROW / 2 + 4
    if row.joined:
        yield (
            f'<rect class="joined" x="0" y="{y:g}" width="{LEFT + WIDTH + RIGHT}" height="{ROW}"/>'
        )
    detail = row.detail
    if len(detail) > LONGEST_DETAIL:
        detail = "\N{HORIZONTAL ELLIPSIS}" + detail[1 - LONGEST_DETAIL :]
    yield (
        f'<text class="name" x="6" y="{middle:g}">{text_of(row.name)}'
        f"<title>{text_of(f'{row.name} {row.detail}')}</title></text>"
        f'<text class="soft" x="{DETAIL}" y="{middle:g}">{text_of(detail)}'
        f"<title>{text_of(row.detail)}</title></text>"
    )
    for span in sorted(row.spans, key=lambda s: s.kind not in IDLE):
        yield _bar(frame, y, row, span)
    if row.spans:
        yield (
            f'<text class="end soft" x="{LEFT + WIDTH + 8}" y="{middle:g}">'
            f"{duration(row.spans[-1].end_s)}</text>"
        )


def _bar(frame: _Frame, y: float, row: Row, span: Span) -> str:
    start = frame.x(span.start_s)
    width = max(2.0, frame.x(span.end_s) - start)
    length = duration(span.end_s - span.start_s)
    about = (
        f"{row.name} {row.detail}: {span.kind}, {length}"
        f" (from {duration(span.start_s)} to {duration(span.end_s)})"
    )
    fitting = [t for t in (f"{span.kind} {length}", length) if LETTER * len(t) + 8 < width]
    inside = ""
    if fitting and span.kind is not Kind.WAIT:
        idle = " idle" if span.kind in IDLE else ""
        inside = (
            f'<text class="inside{idle}" x="{start + 5:.1f}" y="{y + ROW / 2 + 4:g}">'
            f"{fitting[0]}</text>"
        )
    return (
        f'<rect class="{span.kind.name}" x="{start:.1f}"'
        f' y="{y + (ROW - BAR) / 2:g}" width="{width:.1f}" height="{BAR}" rx="2">'
        f"<title>{text_of(about)}</title></rect>{inside}"
    )
