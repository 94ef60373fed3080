"""Spans of one rank: the whole, and its pieces without a gap."""

from dataclasses import replace
from itertools import pairwise

from trainmover.runtime.attempt import Attempt, spans_of
from trainmover.telemetry.spans import ns

JOINED = Attempt(
    incident="g2",
    generation=3,
    worker="m-w4",
    rank=1,
    reached={
        "collected": 1.0,
        "obeyed": 2.0,
        "restored": 3.0,
        "switched": 4.0,
        "resumed": 5.0,
        "first_step": 6.0,
    },
    donor="m-w0",
    num_bytes=4096,
    links=(2, 0, 1),
    error="",
)


def test_a_joiner_obeys_pulls_switches_resumes_and_makes_its_first_step() -> None:
    whole, *pieces = spans_of("r", JOINED)
    assert (whole.name, whole.parent) == ("rank 1 g3", "incident")
    assert [piece.name for piece in pieces] == [
        f"rank 1: {what} g3" for what in ("obey", "pull", "switch", "resume", "first step")
    ]
    assert {piece.parent for piece in pieces} == {whole.name}
    assert (whole.start_ns, whole.end_ns) == (pieces[0].start_ns, pieces[-1].end_ns)
    assert all(before.end_ns == after.start_ns for before, after in pairwise(pieces))
    assert pieces[1].attributes == {
        **{"generation": 3, "rank": 1, "worker": "m-w4"},
        **{"donor": "m-w0", "bytes": 4096},
    }
    assert pieces[2].attributes["opened"] == 2


def test_a_clean_stayer_pulls_nothing_and_leaves_no_gap() -> None:
    reached = {**JOINED.reached, "restored": 2.000001}
    _, *pieces = spans_of("r", replace(JOINED, reached=reached, donor="", num_bytes=0))
    assert [piece.name for piece in pieces[:2]] == ["rank 1: obey g3", "rank 1: switch g3"]
    assert pieces[0].end_ns == pieces[1].start_ns == ns(2.0)


def test_what_was_cut_short_says_how_far_it_came_and_why() -> None:
    reached = dict(list(JOINED.reached.items())[:2])
    cut = replace(JOINED, reached=reached, error="superseded by generation 4")
    whole, *pieces = spans_of("r", cut)
    assert (whole.attributes["reached"], whole.error) == ("obeyed", "superseded by generation 4")
    assert [piece.name for piece in pieces] == ["rank 1: obey g3"]


def test_who_gives_its_rank_away_stands_frozen_beside_the_joiner_of_that_rank() -> None:
    reached = {"frozen": 0.5, **dict(list(JOINED.reached.items())[:3])}
    gave = replace(JOINED, reached=reached, worker="m-w1", donor="", num_bytes=0, gives=True)
    whole, *pieces = spans_of("r", gave)
    assert (whole.name, whole.start_ns, whole.error) == ("rank 1 leaver g3", ns(0.5), "")
    assert [piece.name for piece in pieces] == [
        "rank 1 leaver: frozen g3",
        "rank 1 leaver: obey g3",
    ]
    assert {piece.parent for piece in pieces} == {whole.name}
    joiner = {span.name for span in spans_of("r", JOINED)}
    assert not joiner & {whole.name, *(piece.name for piece in pieces)}


def test_a_worker_that_never_learnt_its_rank_has_no_span() -> None:
    assert spans_of("r", replace(JOINED, rank=None)) == []
