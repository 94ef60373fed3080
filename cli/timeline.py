"""An incident as text: a row of characters for each actor, scaled to the width of the terminal."""

import shutil
import textwrap
from collections.abc import Iterable, Iterator
from itertools import pairwise

from trainmover.cli.axis import ticks
from trainmover.cli.chart import Chart, Milestone, chart
from trainmover.cli.incidents import Incident
from trainmover.cli.phrases import duration, printable, when
from trainmover.cli.reasons import reasons
from trainmover.cli.rows import IDLE, Kind, Row

NARROWEST = 80
UNKNOWN_WIDTH = 100
"""Where output is no terminal and COLUMNS is not set."""
LONGEST_LABEL = 30
INDENT = "  "
GLYPHS = {
    Kind.DETECT: "?",
    Kind.PLAN: "!",
    Kind.PREPARE: "p",
    Kind.FREEZE: "f",
    Kind.COLLECT: "c",
    Kind.CUT: "-",
    Kind.LOST: "x",
    Kind.WAIT: ".",
    Kind.OBEY: "o",
    Kind.SET_UP: "s",
    Kind.PULL: "<",
    Kind.SWITCH: "+",
    Kind.STEP: "#",
}


def terminal_width() -> int:
    """Columns, at least `NARROWEST`."""
    return max(NARROWEST, shutil.get_terminal_size((UNKNOWN_WIDTH, 24)).columns)


def brief(incident: Incident, width: int) -> str:
    """What happened, when what was reached, and what it cost."""
    drawn = chart(incident)
    return "\n".join((*_wrapped(drawn.title, width, indent=""), *_outcome(drawn, width)))


def timeline(incident: Incident, width: int, max_ranks: int = 16) -> str:
    """`brief` with the rows of all actors."""
    drawn = chart(incident, max_ranks)
    title = _wrapped(drawn.title, width, indent="")
    return "\n".join((*title, *_gantt(drawn, width), *_outcome(drawn, width)))


def story(incident: Incident, width: int) -> str:
    """`timeline` with the reasons of every decision."""
    said = (
        line
        for who, at_s, text in reasons(incident)
        for line in _wrapped(f"{who} {'at ' * (at_s >= 0)}{when(at_s)}: {text}", width)
    )
    return "\n".join((timeline(incident, width), *said))


def _outcome(drawn: Chart, width: int) -> Iterator[str]:
    reached = pairwise([Milestone("", 0.0), *drawn.milestones])
    parts = (f"{one.name} {_since(before.at_s, one.at_s)}" for before, one in reached)
    yield from _items(", ", parts, width)
    yield from _wrapped(drawn.cost, width)
    for note in drawn.notes:
        yield from _wrapped(note, width)


def _since(before_s: float, at_s: float) -> str:
    return duration(at_s) + (f" (+{duration(at_s - before_s)})" if before_s else "")


def _gantt(drawn: Chart, width: int) -> Iterator[str]:
    labels = [_label(row) for row in drawn.rows]
    ends = [duration(row.spans[-1].end_s) if row.spans else "" for row in drawn.rows]
    label_width, end_width = max(map(len, labels)), max(map(len, ends))
    cells = width - len(INDENT) - label_width - end_width - 4
    yield f"{INDENT}{'':<{label_width}}  {_axis(drawn.end_s, cells)}"
    for row, label, end in zip(drawn.rows, labels, ends, strict=True):
        yield (
            f"{INDENT}{label:<{label_width}} |{_cells(row, drawn.end_s, cells)}| {end:>{end_width}}"
        )
    yield from _items("   ", (f"{GLYPHS[kind]} {kind}" for kind in drawn.kinds), width)


def _label(row: Row) -> str:
    """The end of a name tells more than its beginning."""
    text = printable(f"{row.name} {row.detail}".strip())
    room = LONGEST_LABEL - len(row.name) - 4
    if len(text) > LONGEST_LABEL:
        text = f"{row.name} ...{printable(row.detail)[-room:]}"
    return text[:LONGEST_LABEL]


def _cells(row: Row, end_s: float, cells: int) -> str:
    """What waits is painted first, then the longest, so that the shortest are seen too."""
    painted = [" "] * cells
    for span in sorted(row.spans, key=lambda s: (s.kind not in IDLE, s.start_s - s.end_s)):
        start = min(cells - 1, int(cells * span.start_s / end_s))
        end = max(start + 1, int(cells * span.end_s / end_s))
        painted[start:end] = GLYPHS[span.kind] * (end - start)
    return "".join(painted)


def _axis(end_s: float, cells: int) -> str:
    line = ""
    for at_s, text in ticks(end_s, max(1, cells // 12)):
        at = int(cells * at_s / end_s)
        if at + len(text) <= cells:
            line = line.ljust(at) + text
    return line


def _items(separator: str, items: Iterable[str], width: int) -> Iterator[str]:
    """As many in a line as fit, none broken."""
    line = ""
    for item in items:
        longer = f"{line}{separator}{item}" if line else INDENT + item
        if line and len(longer) + len(separator.rstrip()) > width:
            yield line + separator.rstrip()
            longer = 2 * INDENT + item
        line = longer
    yield line


def _wrapped(text: str, width: int, indent: str = INDENT) -> Iterator[str]:
    yield from textwrap.wrap(
        printable(text), width, initial_indent=indent, subsequent_indent=indent + INDENT
    )
