"""What is told of a move that was asked for: what moves where, since when, and why not yet."""

import pytest
from tests.unit.planner_histories import (
    ASSIGNED,
    B_TO_D,
    GROUND,
    A,
    C,
    J,
    aborted,
    announced,
    cancelled,
    completed,
    decided,
    failed,
    member,
    prepared,
    registered,
    submitted,
)

from trainmover.cli.pending import Pending, pending
from trainmover.cli.report import report, summary
from trainmover.cli.view import in_lines, view
from trainmover.schemas.base import Event
from trainmover.schemas.events import JobCompleted, JobStarted
from trainmover.schemas.recorded import Recorded

STANDBY = (3.0, registered("d", 3))
ASKED = (9.0, announced("b", reason="its fan is loud"))
MOVE = B_TO_D.model_copy(update={"kind": "planned", "leavers": (member(1, "b"),)})
PLANNED = (9.1, MOVE)


def recorded(*timed: tuple[float, Event]) -> list[Recorded]:
    return [Recorded(seq, *one) for seq, one in enumerate((*GROUND, *timed), start=1)]


def told(*timed: tuple[float, Event]) -> Pending:
    (one,) = pending(recorded(*timed))
    return one


def again(generation: int) -> tuple[float, Event]:
    return 9.1, MOVE.model_copy(update={"generation": generation, "incident": f"g{generation}"})


TRIED = [one for g in (2, 3, 4) for one in (again(g), (9.2, aborted(g)))]


def test_a_planned_one_says_who_moves_where_since_when_and_for_what() -> None:
    one = told(STANDBY, ASKED, PLANNED)
    assert (one.interruption, one.kind, one.reason) == ("move-1", "maintenance", "its fan is loud")
    assert (one.ranks, one.leavers, one.joiners, one.since) == ((1,), ("b",), ("d",), 9.0)


@pytest.mark.parametrize(
    ("timed", "waits_for"),
    [
        ((ASKED,), "a standby: none is free"),
        ((STANDBY, ASKED), "its plan"),
        ((STANDBY, ASKED, PLANNED), "d to be set up, while training goes on"),
        (
            (STANDBY, ASKED, PLANNED, (9.2, prepared(2))),
            "every rank to come to the end of a step",
        ),
        (
            (STANDBY, (8.0, failed("b")), (8.1, B_TO_D), (9.0, announced("c"))),
            "incident g2",
        ),
        ((STANDBY, ASKED, *TRIED), "nothing any more: 3 tries failed; announce it again"),
        (
            (STANDBY, (3.0, registered("e", 4)), (9.0, announced("b", "c", "a"))),
            "3 standbys: 2 are free",
        ),
    ],
)
def test_what_keeps_it_from_being_done_is_said(
    timed: tuple[tuple[float, Event], ...], waits_for: str
) -> None:
    assert told(*timed).waits_for.endswith(waits_for)


def test_before_the_first_step_it_waits_for_the_start_of_the_job() -> None:
    records = [r for r in recorded(STANDBY, ASKED) if not isinstance(r.event, JobStarted)]
    (one,) = pending(records)
    assert one.waits_for == "the start of the job"


def test_one_that_came_later_waits_for_the_one_that_is_planned() -> None:
    later = (9.2, announced("c", name="move-2"))
    first, second = pending(recorded(STANDBY, ASKED, PLANNED, later))
    assert first.joiners == ("d",)
    assert (second.ranks, second.joiners) == ((2,), ())
    assert second.waits_for == "the end of the move before it (generation 2)"


@pytest.mark.parametrize(
    "after",
    [
        (PLANNED, (9.2, decided(2, 7)), (9.3, completed(2))),
        (PLANNED, (9.2, decided(2, 7))),  # told as an incident from here on
        ((9.1, cancelled()),),
        ((9.1, JobCompleted(**J, completed_steps=9, state_digest="d")),),
    ],
)
def test_nothing_is_pending_once_it_is_decided_cancelled_or_the_job_is_over(
    after: tuple[tuple[float, Event], ...],
) -> None:
    assert pending(recorded(STANDBY, ASKED, *after)) == ()


def test_before_ranks_are_assigned_nothing_is_pending() -> None:
    assert pending([Recorded(1, 0.0, submitted()), Recorded(2, 1.0, announced("b"))]) == ()


def test_status_and_report_show_it() -> None:
    records = recorded(STANDBY, ASKED, PLANNED)
    (line,) = (line for line in in_lines(view(records)) if line.startswith("  moving    "))
    for words in (
        "rank 1 b -> d, asked for at ",
        "(move-1, maintenance: its fan is loud); waits for d to",
    ):
        assert words in line
    made = report(records, job="j", run="r1", layout="dp=3", exit_code=None)
    assert dict(summary(made))["moves pending"] == line.removeprefix("  moving    ")
    assert made.pending == pending(records)


def test_members_that_moved_are_no_part_of_what_is_left() -> None:
    back = B_TO_D.model_copy(update={"members": (A, member(1, "d"), C)})
    records = recorded(STANDBY, (8.0, failed("b")), (8.1, back), (9.0, announced("b", "c")))
    (one,) = pending(records)
    assert one.ranks == (2,)
    assert ASSIGNED.members[2].worker == one.leavers[0]
