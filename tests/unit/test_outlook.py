"""What `migrate`, `drain` and `undrain` say before and after they announce something."""

import argparse
from typing import Any

import pytest
from tests.unit.planner_histories import (
    ASSIGNED,
    GROUND,
    J,
    announced,
    launched,
    plan,
    prepared,
    registered,
    submitted,
)

from trainmover.cli import flags, moves, outlook, undrain
from trainmover.cli.main import parser
from trainmover.cli.options import WrongUsage
from trainmover.cli.outlook import Outlook
from trainmover.cli.reach import Target
from trainmover.schemas.base import Event
from trainmover.schemas.events import InterruptionAnnounced
from trainmover.schemas.recorded import Recorded


def seen(*timed: tuple[float, Event], standbys: str = "de") -> Outlook:
    started = [(0.5, launched(w, n)) for n, w in enumerate("abc" + standbys)]
    free = [(3.0, registered(w, 3 + n)) for n, w in enumerate(standbys)]
    events = [GROUND[0], *started, *GROUND[1:], *free, *timed]
    return outlook.outlook([Recorded(n, at_s, event) for n, (at_s, event) in enumerate(events, 1)])


def told(now: Outlook, event: Any, now_s: float = 10.0) -> list[str]:
    return list(outlook.announced(now, event, now_s))


def parsed(*words: str) -> argparse.Namespace:
    return parser().parse_args(words)


# ---- flags


def test_each_rank_goes_to_the_standby_behind_it() -> None:
    args = parsed("migrate", "--rank", "0", "--to", "d", "--rank", "1", "--rank", "2", "--to", "e")
    assert args.moves == [(0, "d"), (1, None), (2, "e")]


@pytest.mark.parametrize(
    "words", [("--to", "d", "--rank", "0"), ("--rank", "0", "--to", "d", "--to", "e")]
)
def test_a_standby_without_its_rank_is_refused(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed("migrate", *words)
    assert "--to W stands behind the --rank R that it is for" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "s"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400)])
def test_times_have_units(text: str, s: float) -> None:
    assert flags.duration(text) == s


@pytest.mark.parametrize("text", ["", "m", "0s", "-1m", "10x", "inf"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="like 90s, 10m or 2h"):
        flags.duration(text)


@pytest.mark.parametrize("text", ["rack", "=r1", "rack=", "rack=a,b", "ra ck=b"])
def test_what_is_no_label_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="like rack=r12"):
        flags.label(text)


# ---- what is announced


def test_ranks_become_workers_with_the_standbys_that_are_named() -> None:
    event = moves.migration(seen(), {2: "e", 0: None}, "loud")
    assert (event.kind, event.workers, event.joiners) == ("rebalance", ("a", "c"), {"c": "e"})
    assert event.interruption.startswith("move-")


@pytest.mark.parametrize(
    ("named", "why"),
    [
        ({0: "b"}, "b is no free standby; free: d, e"),
        ({0: "d", 1: "d"}, "d is no free standby"),
        ({7: None}, "no rank 7"),
    ],
)
def test_a_standby_that_is_not_free_is_refused_with_who_is(
    named: dict[int, str | None], why: str
) -> None:
    with pytest.raises(WrongUsage, match=why):
        moves.migration(seen(), named, "")


def test_a_machine_or_a_worker_is_drained_and_nothing_else() -> None:
    assert moves.maintenance(seen(), "m0", 70.0, "").machine == "m0"
    assert moves.maintenance(seen(), "b", None, "").workers == ("b",)
    with pytest.raises(WrongUsage, match="machines: m0; workers: a, b, c and 2 more"):
        moves.maintenance(seen(), "m7", None, "")


# ---- what is said of it


def test_who_moves_by_when_and_what_it_waits_for() -> None:
    (line,) = told(seen(), announced("a", "c"))
    assert line == "move-1: rank 0 (a), rank 2 (c) move"
    line, waits = told(seen(standbys="d"), announced("a", "c"))
    assert waits == "it waits for 2 standbys; free: d"
    line, waits = told(seen(), announced(machine="m0", name="drain-1"))
    assert waits == "it waits for 3 standbys; free: none"


def test_a_deadline_that_is_too_near_is_said_at_once() -> None:
    line, unknown = told(seen(), announced("a", deadline=70.0))
    assert line.startswith("move-1: rank 0 (a) moves by ")
    assert unknown == "how long a joiner takes to be prepared is not known yet"
    move = plan(2, (1, "b", "d"), members=ASSIGNED.members, reason="").model_copy(
        update={"kind": "planned"}
    )
    before = seen((5.0, move), (35.0, prepared(2)))
    assert len(told(before, announced("a", deadline=46.0))) == 1
    late = told(before, announced("a", deadline=40.0))[-1]
    assert late.startswith("the deadline leaves 30 s, and the last joiners took 30 s")


def test_a_machine_without_ranks_is_told_so_and_stands_in_status() -> None:
    event = announced(name="drain-1", machine="m9")
    (line,) = told(seen(), event)
    assert line == "drain-1: machine m9 holds no rank, and gets none until it is cancelled"
    (line,) = outlook.in_lines(seen((9.0, event)))
    assert line.endswith("gets no rank until `trainmover undrain m9`")
    assert outlook.in_lines(seen((9.0, announced(name="d", machine="m0")))) == []


def test_a_machine_that_has_more_than_ranks_is_told_so() -> None:
    elsewhere = registered("x", 0, "m1").model_copy(update={"addresses": ("tcp:10.0.0.7:5",)})
    two = seen((4.0, launched("x", 0, "m1")), (4.1, elsewhere))
    m1, m0 = (announced(name="drain-1", machine=machine) for machine in ("m1", "m0"))

    def notes(now: Outlook, event: InterruptionAnnounced, url: str, here: bool = False) -> str:
        target = Target(url, "j", b"", from_session=here)
        return " ".join(moves.notes(now, event, target))

    assert notes(two, m1, "nats://10.0.0.9:4222") == ""
    assert "m1 runs the bus" in notes(two, m1, "nats://10.0.0.7:4222")
    assert "m1 runs the bus" in notes(two, m1, "nats://m1:4222")
    assert "its ranks have nowhere to go" in notes(seen(), m0, "nats://127.0.0.1:1", here=True)
    submitted_there = seen((0.1, submitted(host="m0")))
    assert "submitted on m0" in notes(submitted_there, m0, "nats://10.0.0.9:4222")


def test_what_stands_is_cancelled_by_what_it_names() -> None:
    both = seen((9.0, announced("b")), (9.1, announced(name="drain-1", machine="m0")))
    assert [e.interruption for e in undrain.chosen(both, "m0", named=False)] == ["drain-1"]
    assert [e.interruption for e in undrain.chosen(both, "b", named=False)] == ["move-1"]
    assert [e.interruption for e in undrain.chosen(both, "move-1", named=True)] == ["move-1"]
    with pytest.raises(WrongUsage, match="nothing drains m7; what stands: b, m0"):
        undrain.chosen(both, "m7", named=False)
    with pytest.raises(WrongUsage, match="no interruption is named x; what stands: move-1, dr"):
        undrain.chosen(both, "x", named=True)


def test_every_event_is_of_the_run() -> None:
    assert moves.maintenance(seen(), "m0", None, "").run == J["run"]
