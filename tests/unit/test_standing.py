"""For what a worker stands by, in which order, and with which tape."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from structlog.testing import capture_logs
from tests.unit.linked_ranks import WITHIN_S, environment

from trainmover.runtime import warming
from trainmover.runtime.seat import Role, Seat
from trainmover.runtime.standing import Standing
from trainmover.runtime.tape import Key, Tape, TapeUnusable
from trainmover.runtime.tapes import Tapes
from trainmover.runtime.warming import Turn, WarmUp
from trainmover.schemas.commands import Collect, Decided, Retire, StandBy
from trainmover.schemas.layout import Layout
from trainmover.schemas.member import Member

LAYOUT = Layout.parse("pp=3,dp=2")
TOLD = StandBy(layout=LAYOUT, tapes={"first": "first@1", "last": "last@1", "middle": "middle@1"})
RECORDED = Tape(Key("", "", ""), groups=(), sizes=(), starts=())


class Shelf:
    """In the place of the bus: has every tape but those that are gone."""

    gone: str = ""

    def get(self, name: str, role_class: str) -> Tape:
        if name == self.gone:
            raise TapeUnusable("gone")
        assert name.startswith(f"{role_class}@")
        return RECORDED


class Unchanged:
    """In the place of `Lowered`: this process keeps its priority."""

    def restore(self) -> None:
        pass


@pytest.fixture(autouse=True)
def priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "Lowered", Unchanged)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def seat() -> Seat:
    return Seat("m0-w9", lambda: None)


@pytest.fixture
def standing(tmp_path: Path, seat: Seat, shelf: Shelf) -> Iterator[Standing]:
    env = environment(tmp_path, 0, 1).model_copy(
        update={"layout": str(LAYOUT), "worker": "m0-w9", "machine": "m0"}
    )
    made = Standing(env, seat, cast(Tapes, shelf), None, lambda: None)
    seat.told_to_stand_by(TOLD)
    yield made
    made.end()


def next_role(standing: Standing, told: StandBy = TOLD) -> Role:
    role = standing.role(told)
    assert role is not None
    return role


def begin(standing: Standing, seat: Seat) -> Role:
    """As the worker does when its turn has come."""
    role = next_role(standing)
    assert standing.may_begin()
    seat.start(role)
    standing.begin()
    return role


def decided(rank: int) -> Decided:
    member = Member(rank=rank, worker="m0-w9", machine="m0", addresses=())
    return Decided(
        generation=2,
        layout=LAYOUT,
        members=(member,),
        placement=("m0",) * 6,
        target=1,
        tapes=TOLD.tapes,
    )


def test_it_is_warm_for_one_class_after_the_other_and_stays_in_the_last(
    standing: Standing, seat: Seat
) -> None:
    stays = []
    for _ in range(3):
        role = begin(standing, seat)
        stays.append((role.role_class, role.rank, role.tape, standing.warmed(role)))
    assert stays == [
        ("first", 1, "first@1", False),
        ("last", 5, "last@1", False),
        ("middle", 3, "middle@1", True),
    ]
    assert standing.role(TOLD) is None


def test_with_other_tapes_it_warms_up_again(standing: Standing, seat: Seat) -> None:
    for _ in range(3):
        standing.warmed(role := begin(standing, seat))
    assert not seat.outdated
    again = TOLD.model_copy(update={"tapes": {name: f"{name}@2" for name in TOLD.tapes}})
    seat.told_to_stand_by(again)
    assert seat.role == role
    assert seat.outdated
    assert next_role(standing, again).tape == "first@2"


def test_a_class_without_a_tape_comes_as_well(standing: Standing, seat: Seat) -> None:
    seat.told_to_stand_by(told := TOLD.model_copy(update={"tapes": {}}))
    role = next_role(standing, told)
    assert (role.role_class, role.tape, standing.tape(role)) == ("first", "", None)
    seat.start(role)
    assert not seat.outdated


def test_who_is_wanted_for_a_rank_does_not_go_on_to_the_next_class(
    standing: Standing, seat: Seat
) -> None:
    role = begin(standing, seat)
    seat.collect(Collect(generation=2, assignment="x"), lambda generation: None)
    assert standing.warmed(role)


def test_a_joiner_gets_the_tape_of_its_class(standing: Standing) -> None:
    role = standing.joiner(decided(rank=4))
    assert (role.rank, role.generation, role.role_class, role.tape) == (4, 2, "last", "last@1")
    assert standing.tape(role) is RECORDED


def test_a_tape_that_does_not_fit_is_given_to_nobody_again(standing: Standing, seat: Seat) -> None:
    role = begin(standing, seat)
    standing.end()
    standing.mismatched(role)
    assert next_role(standing).role_class == "last"
    assert standing.tape(standing.joiner(decided(rank=0))) is None
    assert standing.tape(standing.joiner(decided(rank=2))) is RECORDED


def test_without_the_tape_that_cannot_be_had_groups_echo(standing: Standing, shelf: Shelf) -> None:
    shelf.gone = "first@1"
    with capture_logs() as logs:
        assert standing.tape(next_role(standing)) is None
    assert [(log["event"], log["reason"]) for log in logs] == [("tape.unusable", "gone")]


# ---- what ends a warm-up


def test_a_rank_ends_the_low_priority_at_once(
    standing: Standing, seat: Seat, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored = threading.Event()
    monkeypatch.setattr(Unchanged, "restore", lambda lowered: restored.set())
    begin(standing, seat)
    assert not restored.is_set()
    seat.collect(Collect(generation=2, assignment="x"), lambda generation: None)
    assert restored.wait(WITHIN_S)


def test_a_warm_up_that_takes_too_long_is_told(
    tmp_path: Path, seat: Seat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warming, "WARM_S", 0.0)
    late = threading.Event()
    warm_up = WarmUp(Turn(tmp_path), seat, late.set)
    assert late.wait(WITHIN_S)
    warm_up.end()


def test_a_warm_up_that_is_over_is_never_late(tmp_path: Path, seat: Seat) -> None:
    late: list[bool] = []
    warm_up = WarmUp(Turn(tmp_path), seat, lambda: late.append(True))
    warm_up.end()
    for thread in threading.enumerate():
        if thread.name == "tm-warm-up":
            thread.join(WITHIN_S)
            assert not thread.is_alive()
    assert late == []
    seat.retire(Retire(reason="test"))
    warm_up.end()
