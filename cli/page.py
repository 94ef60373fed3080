"""A report as one HTML file that needs nothing else: no script, no font, no request."""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime

from trainmover.cli.chart import Chart, chart, moved
from trainmover.cli.incidents import Incident
from trainmover.cli.phrases import duration, when
from trainmover.cli.reasons import reasons
from trainmover.cli.report import Happened, Report, summary
from trainmover.cli.svg import STYLE, svg, text_of

MAX_RANKS = 24
"""Rows of ranks in one incident's timeline."""
TILES = ("outcome", "goodput", "time lost", "wall time", "incidents")
LONGEST_TILE = 48
IN_THE_HEAD = ("job", "run", "layout")

PAGE = """\
<!DOCTYPE html>
<html xmlns="http://www.w3.org/1999/xhtml" lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
COLOURS_OF_THE_PAGE = """
:root { color-scheme: light dark; --ground: #f8fafc; --card: #ffffff; --ink: #0f172a;
  --soft: #64748b; --line: #e2e8f0; --wait: #e8edf3; --joined: #fef6e7;
  --good: #15803d; --bad: #b91c1c; --open: #b45309; }
@media (prefers-color-scheme: dark) {
  :root { --ground: #0b1120; --card: #131c2e; --ink: #e2e8f0; --soft: #94a3b8;
    --line: #26324a; --wait: #26324a; --joined: #2a2618; --good: #4ade80; --bad: #f87171;
    --open: #fbbf24; } }
"""
STYLE_OF_THE_PAGE = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 14px/1.5 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 22px; margin: 0 0 2px; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 2px; overflow-wrap: anywhere; }
p { margin: 0; } .soft { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px;
  margin: 18px 0; }
.card, .tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tiles div { padding: 10px 14px; } .tiles b { display: block; font-size: 18px; line-height: 1.3;
  overflow-wrap: anywhere; }
.card { padding: 16px 18px; margin: 0 0 18px; }
.scroll { overflow-x: auto; } .drawn { margin: 12px 0 6px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 18px; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; } th { color: var(--soft); font-weight: 500; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
td.who { min-width: 180px; }
th, td.short { white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
.completed { color: var(--good); } .aborted { color: var(--bad); } .open { color: var(--open); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 12px; color: var(--soft); }
.legend svg { display: inline-block; min-width: 0; width: 12px; height: 12px; margin-right: 5px;
  vertical-align: -1px; }
.reasons { margin-top: 12px; border-top: 1px solid var(--line); }
.reasons td:first-child { white-space: nowrap; color: var(--soft); }
summary { cursor: pointer; font-weight: 600; } details table { margin-top: 10px; font-size: 13px; }
a { color: inherit; }
"""


def page(report: Report) -> str:
    """Well-formed XML too; every text that comes from events is escaped."""
    facts = summary(report)
    body = "\n".join(
        (
            _head(report),
            _tiles(facts),
            _facts(facts),
            *_incidents(report),
            *_events(report.events),
        )
    )
    style = COLOURS_OF_THE_PAGE + STYLE_OF_THE_PAGE + STYLE
    return PAGE.format(title=text_of(f"{report.job}: report"), style=style, body=body)


def _head(report: Report) -> str:
    at = ""
    if report.submitted is not None:
        when = datetime.fromtimestamp(report.submitted, UTC)
        at = f", submitted {when:%Y-%m-%d %H:%M:%S} UTC"
    return (
        f"<h1>{text_of(report.job)}</h1>"
        f'<p class="soft">run {text_of(report.run)}, layout {text_of(report.layout)}{at}</p>'
    )


def _tiles(facts: Iterable[tuple[str, str]]) -> str:
    tiles = (
        f'<div><span class="soft">{what}</span><b>{text_of(value)}</b></div>'
        for what, value in facts
        if _is_tile(what, value)
    )
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _is_tile(what: str, value: str) -> bool:
    """Not when a long reason is part of it."""
    return what in TILES and len(value) <= LONGEST_TILE


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    rows = (
        f"<dt>{what}</dt><dd>{text_of(value)}</dd>"
        for what, value in facts
        if what not in IN_THE_HEAD and not _is_tile(what, value)
    )
    return f'<section class="card"><dl>{"".join(rows)}</dl></section>'


def _incidents(report: Report) -> Iterator[str]:
    if not report.incidents:
        return
    rows = "".join(_incident_row(incident) for incident in report.incidents)
    yield (
        '<section class="card scroll"><table><tr><th>incident</th><th>kind</th><th>outcome</th>'
        '<th>who</th><th class="n">detected</th><th class="n">decided</th>'
        '<th class="n">switched</th><th class="n">first step</th><th class="n">downtime</th>'
        f'<th class="n">lost steps</th></tr>{rows}</table></section>'
    )
    yield from (_incident(incident) for incident in report.incidents)


def _incident_row(incident: Incident) -> str:
    times = (
        incident.detected_s,
        incident.prepared_s,
        incident.switched_s,
        incident.first_step_s,
        incident.downtime_s,
    )
    cells = "".join(f'<td class="n">{"" if s is None else duration(s)}</td>' for s in times)
    lost = "" if incident.lost_steps is None else str(incident.lost_steps)
    name = text_of(incident.incident)
    return (
        f'<tr><td class="short"><a href="#{name}">{name}</a></td>'
        f'<td class="short">{text_of(incident.kind)}</td>'
        f'<td class="short {incident.outcome}">{incident.outcome}</td>'
        f'<td class="who">{text_of(moved(incident))}</td>'
        f'{cells}<td class="n">{lost}</td></tr>'
    )


def _incident(incident: Incident) -> str:
    drawn = chart(incident, MAX_RANKS)
    said = "".join(
        f'<tr><td>{text_of(who)}</td><td class="n">{when(at_s)}</td><td>{text_of(text)}</td></tr>'
        for who, at_s, text in reasons(incident)
    )
    notes = "".join(f'<p class="soft">{text_of(note)}</p>' for note in drawn.notes)
    return (
        f'<section class="card" id="{text_of(incident.incident)}"><h2>{text_of(drawn.title)}</h2>'
        f'<p class="{incident.outcome}">{text_of(drawn.cost)}</p>'
        f'<div class="scroll drawn">{svg(drawn)}</div>{_legend(drawn)}{notes}'
        f'<table class="reasons">{said}</table></section>'
    )


def _legend(drawn: Chart) -> str:
    items = (
        f'<span><svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 12 12">'
        f'<rect class="{kind.name}" width="12" height="12" rx="2"/></svg>{kind}</span>'
        for kind in drawn.kinds
    )
    return f'<div class="legend">{"".join(items)}</div>'


def _events(events: Iterable[Happened]) -> Iterator[str]:
    rows = "".join(
        f'<tr><td class="n">{event.at_s:.3f} s</td><td class="short">{text_of(event.type)}</td>'
        f"<td>{text_of(event.words)}</td></tr>"
        for event in events
    )
    if rows:
        yield (
            '<section class="card"><details><summary>All events</summary>'
            f"<table>{rows}</table></details></section>"
        )
