"""An incident as text, page and picture: whatever happened, it can be seen."""

import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.incident_streams import (
    CRASH,
    GIVEN_UP,
    MOVE,
    MOVE_DROPPED,
    MOVE_OPEN,
    MOVE_SUPERSEDED,
    MOVE_UNDONE,
    OPEN,
    REPLANNED,
    STAGES,
    aborted,
    announced,
    completed,
    decided,
    failed,
    move,
    planned,
    prepared,
    started,
    stream,
    submitted,
    switched,
    times,
)

from trainmover.cli.axis import lanes, ticks
from trainmover.cli.chart import chart
from trainmover.cli.incidents import incidents
from trainmover.cli.page import page
from trainmover.cli.phrases import duration, printable, ranks_in_words
from trainmover.cli.plot import NoMatplotlib, plot
from trainmover.cli.report import Report, report
from trainmover.cli.rows import Kind
from trainmover.cli.timeline import brief, story, timeline
from trainmover.schemas.base import Event
from trainmover.schemas.commands import Mark
from trainmover.schemas.recorded import Recorded

TEXTS = st.text(max_size=200) | st.just("<script>alert('&')</script>\x1b[31m\x00 $x^2$ ]]>")
NAMES = st.from_regex(r"[a-z][a-z0-9]{0,40}-w", fullmatch=True)


@st.composite
def histories(draw: st.DrawFn) -> list[Recorded]:
    """An interruption with some plans, each of which comes some way; clocks are what they are."""
    num_ranks = draw(st.integers(1, 40))
    prefix = draw(NAMES)
    rank = draw(st.integers(0, num_ranks - 1))
    now = 0.0
    timed: list[tuple[float, Event]] = [(now, submitted(num_ranks)), (now, started())]

    def later(event: Event) -> None:
        nonlocal now
        now += draw(st.sampled_from((0.0, 1e-6, 0.004, 0.3, 7.0, 900.0)))
        timed.append((now, event))

    first_is_move = draw(st.booleans())
    if first_is_move and draw(st.booleans()):
        later(announced(reason=draw(TEXTS)))
    if not first_is_move and draw(st.booleans()):
        later(failed("m-w1", first_evidence=now, evidence=draw(TEXTS)))
    num_plans = draw(st.integers(1, 5))
    for generation in range(2, num_plans + 2):
        moves = draw(st.sampled_from(((), ((rank, "m-w1", f"{prefix}{generation}"),))))
        if first_is_move and generation == 2:
            later(move(2, num_ranks))
            if draw(st.booleans()):
                later(prepared(2))
        else:
            later(planned(generation, moves, num_ranks, reason=draw(TEXTS)))
        last = generation == num_plans + 1
        reached = draw(st.integers(0, 2))
        if reached > 0:
            later(decided(generation, dirty=(rank,), holding=tuple(range(num_ranks))))
        if reached > 1:
            later(switched(generation, links={"0": (1, 2, 3)}))
        if not last or draw(st.booleans()):
            later(aborted(generation, reason=draw(TEXTS)))
        elif draw(st.booleans()):
            seconds = st.floats(-1e4, 1e4, allow_nan=False)
            paths = [
                times(
                    r,
                    f"{prefix}{r}",
                    *draw(st.lists(seconds, max_size=6)),
                    joined=r == rank,
                    frozen=draw(st.none() | seconds),
                )
                for r in range(num_ranks)
            ]
            later(completed(generation, paths, draw(st.none() | st.floats(0, 10))))
    return stream(*timed)


def reported(records: list[Recorded]) -> Report:
    return report(records, job="j", run="r1", layout="dp=4", exit_code=None)


@settings(max_examples=60, deadline=None)
@given(histories(), st.integers(80, 200), st.integers(1, 20))
def test_whatever_happened_has_a_timeline_that_keeps_to_the_width(
    records: list[Recorded], width: int, max_ranks: int
) -> None:
    for incident in incidents(records):
        for text in (story(incident, width), timeline(incident, width, max_ranks)):
            assert max(map(len, text.splitlines())) <= width
            assert all(line.isprintable() for line in text.split("\n"))


@settings(max_examples=60, deadline=None)
@given(histories(), st.integers(1, 20))
def test_whatever_happened_its_spans_lie_on_the_axis_one_after_the_other(
    records: list[Recorded], max_ranks: int
) -> None:
    for incident in incidents(records):
        drawn = chart(incident, max_ranks)
        assert sum(row.name.startswith(("rank", "1 ")) for row in drawn.rows) <= max_ranks
        for row in drawn.rows:
            edges = [edge for span in row.spans for edge in (span.start_s, span.end_s)]
            if row.name != "detector":
                assert edges == sorted(edges)
            assert all(0 <= edge <= drawn.end_s for edge in edges)
        at = [milestone.at_s for milestone in drawn.milestones]
        assert at == sorted(at)
        assert all(0 <= one <= drawn.end_s for one in at)


@settings(max_examples=60, deadline=None)
@given(histories())
def test_whatever_happened_has_a_page_in_which_every_text_is_a_text(
    records: list[Recorded],
) -> None:
    made = reported(records)
    root = ElementTree.fromstring(page(made))
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert not tags & {"script", "link", "img", "iframe", "object"}
    shown = "".join(root.itertext())
    for incident in made.incidents:
        assert printable(incident.reason) in shown
        assert all(printable(failure.evidence) in shown for failure in incident.failures)


@pytest.mark.parametrize(
    "records", [CRASH, REPLANNED, OPEN, GIVEN_UP, MOVE, MOVE_DROPPED, MOVE_OPEN, MOVE_UNDONE]
)
def test_a_report_as_json_makes_the_same_page_and_picture(
    records: list[Recorded], tmp_path: Path
) -> None:
    made = reported(records)
    again = Report.model_validate_json(made.model_dump_json())
    assert page(again) == page(made)
    plot(again, tmp_path / "again.png")
    plot(made, tmp_path / "made.png")
    written = (tmp_path / "made.png").read_bytes()
    assert written.startswith(b"\x89PNG")
    assert (tmp_path / "again.png").read_bytes() == written


def test_texts_that_look_like_formulas_are_drawn_as_they_are(tmp_path: Path) -> None:
    evil = stream((0.0, failed(evidence="$\\frac{$ <b>")), (0.1, planned(reason="$_$")))
    plot(reported(evil), tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 1000


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(NoMatplotlib, match=r"trainmover\[plots\]"):
        plot(reported(CRASH), tmp_path / "one.png")


# ---- what is told


def test_a_joiner_is_drawn_from_the_death_of_the_leaver_to_its_first_step() -> None:
    (incident,) = incidents(CRASH)
    joiner = next(row for row in chart(incident).rows if row.joined)
    assert (joiner.name, joiner.detail) == ("rank 1", "m-w9 (was m-w1)")
    assert [span.kind for span in joiner.spans] == [
        Kind.LOST,
        Kind.WAIT,
        Kind.SET_UP,
        Kind.PULL,
        Kind.SWITCH,
        Kind.WAIT,
        Kind.STEP,
    ]


def test_a_stayer_waits_for_the_joiner_before_links_are_switched() -> None:
    (incident,) = incidents(CRASH)
    stayer = next(row for row in chart(incident).rows if row.name == "rank 0")
    waits = [s for s in stayer.spans if s.kind is Kind.WAIT]
    assert waits[1].end_s == pytest.approx(0.35)


def test_a_timeline_names_actors_milestones_cost_and_reasons() -> None:
    (incident,) = incidents(CRASH)
    text = " ".join(story(incident, 100).split())
    for words in (
        "incident g2 (crash, completed): rank 1: m-w1 -> m-w9",
        "planner",
        "fault 0 ms, first evidence 20 ms, detected 30 ms (+10 ms), planned 50 ms (+20 ms)",
        "collected 80 ms (+30 ms), decided 150 ms (+70 ms), pulled 350 ms (+200 ms)",
        "downtime 500 ms since fault.injected (less one step of 100 ms), lost steps: 0",
        "detector at 30 ms: m-w1: crash; killed by SIGKILL",
        "all go on from 7 committed steps; rank 1 (m-w9) takes its state from any of m-w0, m-w2",
        "rank 1 took 5.2 MB from m-w0 in 12 ms",
    ):
        assert words in text


def test_a_phase_of_no_width_still_has_its_mark() -> None:
    tiny = completed(
        ranks=[
            times(0, "m-w0", 0.1001, 0.1003, 0.1003, 899.9, 899.95, 900.0),
            times(1, "m-w9", 0.1002, 0.1003, 899.8, 899.9, 899.95, 900.0, joined=True),
        ]
    )
    (incident,) = incidents(
        stream((0.1, planned(num_ranks=2)), (0.1002, decided()), (899.92, switched()), (900, tiny))
    )
    row = next(r for r in timeline(incident, 80).splitlines() if r.strip().startswith("rank 0"))
    assert "o" in row.partition("|")[2]
    assert "#" in row


def test_the_reason_of_a_plan_that_was_given_up_is_told() -> None:
    (incident,) = incidents(REPLANNED)
    assert "generation 2 given up: m-w9 did not answer; missing: m-w9" in story(incident, 120)
    assert "aborted g2 2000 ms" in brief(incident, 120)


def test_an_incident_without_an_end_says_so() -> None:
    (incident,) = incidents(OPEN)
    assert "open: rank 1 lost its worker" in brief(incident, 80)


def test_times_that_a_wrong_clock_gave_are_said_to_be_moved() -> None:
    wrong = completed(ranks=[times(0, "m-w0", -3.0), times(1, "m-w9", 0.11, joined=True)])
    (incident,) = incidents([*CRASH[:-1], *stream((0.6, wrong))])
    (note,) = chart(incident).notes
    assert note.startswith("clocks: times of m-w0 were moved by up to 3050 ms")


def test_of_many_ranks_the_joiner_its_neighbours_and_the_slowest_have_rows() -> None:
    paths = [
        times(r, f"m-w{r}", 0.06, 0.16, 0.2, 0.38, 0.41, 0.5 + (0.05 if r == 50 else r / 1e4))
        for r in range(64)
    ]
    paths[20] = times(20, "m-w9", 0.07, 0.3, 0.35, 0.39, 0.41, 0.5, joined=True)
    (incident,) = incidents([*CRASH[:-1], *stream((0.6, completed(ranks=paths)))])
    names = [row.name for row in chart(incident, 5).rows[3:]]
    assert names == ["rank 19", "rank 20", "rank 21", "rank 50", "60 others"]


# ---- planned


def test_a_move_is_drawn_from_the_freeze_on_and_nobody_is_cut_off_or_missing() -> None:
    (incident,) = incidents(MOVE)
    drawn = chart(incident)
    assert [row.name for row in drawn.rows] == ["mover", "rank 0", "rank 1", "rank 2"]
    mover, stayer, joiner, first = drawn.rows
    assert [span.kind for span in mover.spans] == [
        *(Kind.FREEZE, Kind.COLLECT, Kind.PULL, Kind.SWITCH, Kind.STEP)
    ]
    assert [span.kind for span in stayer.spans] == [
        *(Kind.FREEZE, Kind.WAIT, Kind.WAIT, Kind.SWITCH, Kind.WAIT, Kind.STEP)
    ]
    assert [span.kind for span in joiner.spans] == [
        *(Kind.WAIT, Kind.WAIT, Kind.PULL, Kind.SWITCH, Kind.WAIT, Kind.STEP)
    ]
    assert stayer.spans[0].start_s == pytest.approx(0.01)
    assert first.spans[0].start_s == pytest.approx(0)
    assert (joiner.detail, joiner.joined) == ("m-w9 (was m-w1)", True)


def test_a_move_tells_its_prelude_with_durations_and_its_cost() -> None:
    (incident,) = incidents(MOVE)
    text = " ".join(story(incident, 200).split())
    for words in (
        "incident g2 (planned, completed): rank 1: m-w1 -> m-w9",
        "freeze 0 ms, decided 100 ms, collected 120 ms (+20 ms), pulled 170 ms (+50 ms)",
        "downtime 300 ms since freeze (less one step of 100 ms), lost steps: 0",
        "while training went on: planned 100 ms after the announcement, prepared in 5000 ms,"
        " frozen 100 ms later, at the end of a step",
        "planner 5100 ms before: generation 2: rank 1 moves from m-w1 to m-w9",
        "mover 100 ms before: generation 2: m-w9 set up, links open",
    ):
        assert words in text


@pytest.mark.parametrize("records", [MOVE, MOVE_DROPPED, MOVE_UNDONE])
def test_a_page_tells_the_prelude_of_a_move(records: list[Recorded]) -> None:
    shown = "".join(ElementTree.fromstring(page(reported(records))).itertext())
    assert "while training went on: planned 100 ms after the announcement" in shown


def test_a_move_that_is_not_decided_has_no_rows_of_ranks_and_says_that_training_goes_on() -> None:
    (dropped,), (open_one,) = incidents(MOVE_DROPPED), incidents(MOVE_OPEN)
    assert [row.name for row in chart(dropped).rows] == ["mover"]
    assert "aborted, training went on: m-w9 ended" in brief(dropped, 120)
    assert "open, training goes on: rank 1 moves" in brief(open_one, 120)
    superseded, _ = incidents(MOVE_SUPERSEDED)
    assert "training went on: superseded by generation 3: rank 0 died" in brief(superseded, 120)


def test_a_move_that_was_undone_says_who_kept_the_rank() -> None:
    (incident,) = incidents(MOVE_UNDONE)
    drawn = chart(incident)
    assert drawn.title == "incident g2 (crash in a move, completed): rank 1 stays with m-w1"
    stayer = next(row for row in drawn.rows if row.name == "rank 1")
    assert (stayer.detail, stayer.spans[0].kind) == ("m-w1", Kind.FREEZE)


def test_the_row_of_the_mover_has_no_hole_where_a_plan_was_overtaken_by_the_next() -> None:
    (incident,) = incidents(MOVE_UNDONE)
    (mover,) = (row for row in chart(incident).rows if row.name == "mover")
    assert mover.spans[0].start_s == 0
    assert mover.spans[-1].end_s == incident.first_step_s
    assert all(before.end_s == after.start_s for before, after in pairwise(mover.spans))


# ---- parts


@given(st.floats(0.01, 1e6), st.integers(1, 20))
@example(0.01, 20)
@example(0.85, 17)  # 17 * 0.05 is a bit more than 0.85
def test_ticks_are_round_rise_from_0_and_stay_on_the_axis(end_s: float, most: int) -> None:
    places = ticks(end_s, most)
    at = [at_s for at_s, _ in places]
    assert at == sorted(set(at))
    assert at[0] == 0
    assert at[-1] <= end_s
    assert len(places) <= most + 1
    assert len({label for _, label in places}) == len(places)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(1, 40)), max_size=12))
def test_no_label_covers_another_and_no_line_goes_through_a_label(
    labels: list[tuple[float, float]],
) -> None:
    labels.sort()
    places, widths = [at for at, _ in labels], [width for _, width in labels]
    levels = lanes(places, widths, gap=1)
    for i, (at, width) in enumerate(labels):
        for j in range(i + 1, len(labels)):
            if at <= places[j] < at + width:
                assert levels[i] > levels[j]  # the line of j ends below the text of i


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ms"), (0.0264, "26 ms"), (9.99, "9990 ms"), (12.34, "12.3 s"), (900, "15 min")],
)
def test_a_duration_has_the_unit_that_fits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_ranks_in_words_are_runs_and_many_runs_a_number() -> None:
    assert ranks_in_words((3,)) == "rank 3"
    assert ranks_in_words((0, 1, 2, 5)) == "ranks 0-2, 5"
    assert ranks_in_words(range(0, 20, 2)) == "10 ranks"


def test_stages_of_the_stories_are_those_of_the_contract() -> None:
    assert get_args(Mark) == ("frozen", *STAGES)
