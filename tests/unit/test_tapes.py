"""Tapes lie on the bus under the name of their role class, and are known by what is in them."""

from pathlib import Path
from typing import cast

import pytest
import torch
from tests.unit.linked_ranks import environment

from trainmover.bus.port import Missing, Refused
from trainmover.runtime.control import Control
from trainmover.runtime.tape import Entry, Tape, TapeUnusable
from trainmover.runtime.tapes import Tapes


class Objects:
    """In the place of Control: a dict for a bus."""

    def __init__(self) -> None:
        self.stored: dict[str, bytes] = {}
        self.failure: Exception | None = None

    def put(self, name: str, data: bytes, within_s: float) -> None:
        self._fail()
        self.stored[name] = data

    def get(self, name: str, within_s: float) -> bytes:
        self._fail()
        if name not in self.stored:
            raise Missing(f"no object {name!r} is stored")
        return self.stored[name]

    def _fail(self) -> None:
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def objects() -> Objects:
    return Objects()


@pytest.fixture
def tapes(objects: Objects, tmp_path: Path) -> Tapes:
    return Tapes(environment(tmp_path, 0, 2), cast(Control, objects))


def tape(tapes: Tapes, value: int, role_class: str = "my@class") -> Tape:
    entry = Entry("all_reduce", "torch.int64", (1,), {0: torch.tensor([value])})
    return Tape(tapes.key(role_class), ((entry,),), (1,), ())


def test_a_tape_is_got_back_by_the_name_it_was_put_under(tapes: Tapes) -> None:
    name = tapes.put(tape(tapes, 5))
    back = tapes.get(name, "my@class")
    assert back.groups[0][0].values[0].item() == 5


def test_a_name_tells_tapes_apart_that_differ_and_no_others(tapes: Tapes) -> None:
    assert tapes.put(tape(tapes, 5)) == tapes.put(tape(tapes, 5))
    assert tapes.put(tape(tapes, 5)) != tapes.put(tape(tapes, 6))


def test_a_tape_that_was_replaced_since_is_unusable(tapes: Tapes, objects: Objects) -> None:
    old, new = tapes.put(tape(tapes, 5)), tapes.put(tape(tapes, 6))
    assert len(objects.stored) == 1
    with pytest.raises(TapeUnusable, match="was replaced by a newer one"):
        tapes.get(old, "my@class")
    assert tapes.get(new, "my@class").groups[0][0].values[0].item() == 6


def test_a_tape_of_another_role_class_is_unusable(tapes: Tapes) -> None:
    name = tapes.put(tape(tapes, 5, "first"))
    with pytest.raises(TapeUnusable, match="expected a tape of role class last, got one of first"):
        tapes.get(name, "last")


@pytest.mark.parametrize("failure", [Missing("gone"), Refused("full"), TimeoutError()])
def test_a_bus_that_does_not_have_it_makes_it_unusable(
    tapes: Tapes, objects: Objects, failure: Exception
) -> None:
    made = tape(tapes, 5)
    name = tapes.put(made)
    objects.failure = failure
    with pytest.raises(TapeUnusable, match="could not be stored"):
        tapes.put(made)
    with pytest.raises(TapeUnusable, match="could not be fetched"):
        tapes.get(name, "my@class")
