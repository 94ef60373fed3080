"""When standbys are told what to be warm for, and with what."""

from collections.abc import Iterable

from tests.unit.planner_histories import ASSIGNED, B_TO_D, J, failed, registered, submitted

from trainmover.schemas.base import Event
from trainmover.schemas.commands import Answer, Decided, Stage, StandBy
from trainmover.schemas.events import (
    MigrationDecided,
    RankReady,
    StandbyMismatched,
    StandbyWarmed,
)
from trainmover.schemas.recorded import Recorded
from trainmover.services.contract import Ask, Inputs, Output
from trainmover.services.mover.decide import SERVICE
from trainmover.services.mover.state import State

CLASSES = ("first", "middle", "last")
TAPES = {name: f"{name}@1" for name in CLASSES}


def ready(rank: int, generation: int = 1, tape: str | None = None) -> RankReady:
    return RankReady(
        **J,
        worker="abc"[rank],
        rank=rank,
        generation=generation,
        shards={},
        role_class=CLASSES[rank],
        tape=TAPES[CLASSES[rank]] if tape is None else tape,
    )


def warmed(worker: str, role_class: str, tape: str | None = None) -> StandbyWarmed:
    name = TAPES[role_class] if tape is None else tape
    return StandbyWarmed(
        **J, worker=worker, rank=0, warm_s=1.0, role_class=role_class, tape=name, resident=True
    )


GROUND: tuple[Event, ...] = (
    submitted("pp=3"),
    *(registered(worker, index) for index, worker in enumerate("abcd")),
    ASSIGNED,
)
SET_UP = (*GROUND, ready(0), ready(1), ready(2))


def fold(events: Iterable[Event]) -> State:
    state = SERVICE.initial
    for seq, event in enumerate(events, 1):
        state = SERVICE.evolve(state, Recorded(seq, float(seq), event))
    return state


def says(state: State, **answers: Answer) -> list[Output]:
    return list(SERVICE.decide(state, Inputs(now_s=20.0, up_since_s=0.0, answers=answers)))


def told(*events: Event) -> dict[str, dict[str, str]]:
    """Standby -> the tapes that it is told of."""
    asked = (out for out in says(fold(events)) if isinstance(out, Ask))
    return {a.worker: a.command.tapes for a in asked if isinstance(a.command, StandBy)}


def test_nobody_stands_by_before_the_first_set_up_is_over() -> None:
    assert told(*GROUND) == {}
    assert told(*SET_UP[:-1]) == {}
    assert told(*SET_UP) == {"d": TAPES}


def test_a_standby_is_told_until_it_has_tried_every_class() -> None:
    history = [*SET_UP, warmed("d", "first"), warmed("d", "last")]
    assert told(*history) == {"d": TAPES}
    assert told(*history, warmed("d", "middle")) == {}


def test_a_class_that_a_standby_cannot_be_warm_for_is_not_asked_again() -> None:
    wrong = StandbyMismatched(
        **J, worker="d", rank=1, role_class="middle", tape="middle@1", reason="other shapes"
    )
    assert told(*SET_UP, warmed("d", "first"), warmed("d", "last"), wrong) == {}


def test_what_nobody_recorded_is_warmed_up_for_without() -> None:
    history = [*GROUND, ready(0), ready(1, tape=""), ready(2)]
    assert told(*history) == {"d": {"first": "first@1", "last": "last@1"}}
    done = [warmed("d", "first"), warmed("d", "last"), warmed("d", "middle", "")]
    assert told(*history, *done) == {}


def test_who_comes_later_and_who_takes_a_rank_change_no_tape() -> None:
    later = ready(1, 2, tape="").model_copy(update={"worker": "d"})
    state = fold([*SET_UP, failed("b"), B_TO_D, decided(2), later, registered("e", 4)])
    assert state.tapes == TAPES
    assert state.wanted == set(TAPES.items())


def test_who_comes_while_a_rank_waits_for_a_worker_does_not_warm_up_first() -> None:
    dead = failed("b")
    assert told(*SET_UP[:4], *SET_UP[5:], dead, registered("e", 4)) == {}
    assert told(*SET_UP, dead, B_TO_D, registered("e", 4)) == {"e": TAPES}


def test_another_set_up_makes_every_standby_warm_up_again() -> None:
    warm = [warmed("d", name) for name in CLASSES]
    again = [*SET_UP, *warm, failed("b"), B_TO_D, decided(2, setup_again=True)]
    assert fold(again).wanted == frozenset()
    late = ready(0, 1)  # of the set-up that was cut
    assert fold([*again, late]).role_classes == {}
    new = [ready(0, 2, "first@2"), ready(1, 2, "middle@2"), ready(2, 2, "last@2")]
    assert fold([*again, *new]).wanted == {(name, f"{name}@2") for name in CLASSES}


def test_a_joiner_is_told_the_tapes_with_its_rank() -> None:
    state = fold([*SET_UP, registered("e", 4), failed("b"), B_TO_D, decided(2)])
    collected = {
        w: Answer(worker=w, about=2, stage=Stage.COLLECTED, promised=2) for w in ("a", "c", "d")
    }
    asked = [o for o in says(state, **collected) if isinstance(o, Ask) and o.worker == "d"]
    (command,) = (ask.command for ask in asked)
    assert isinstance(command, Decided)
    assert command.tapes == TAPES


def decided(generation: int, *, setup_again: bool = False) -> MigrationDecided:
    return MigrationDecided(
        **J, generation=generation, incident="g2", target=0, setup_again=setup_again
    )
