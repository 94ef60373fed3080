"""What an agent knows of its machine from the stream: holders, whom it has to make go, drains."""

from tests.unit.planner_histories import (
    ASSIGNED,
    A,
    B,
    C,
    aborted,
    announced,
    cancelled,
    decided,
    member,
    plan,
    switched,
)

from trainmover.agent.tenure import LEAVER_LINGERS_S, RETIRE_WITHIN_S, Tenure
from trainmover.schemas.base import Event

D = member(1, "d")
MOVE = plan(2, (1, "b", "d"), members=(A, D, C), reason="").model_copy(
    update={"kind": "planned", "leavers": (B,)}
)
CRASH = plan(3, (2, "c", "e"), members=(A, B, member(2, "e", "m1")), reason="")


def after(*events: Event) -> Tenure:
    tenure = Tenure("m0")
    for event in events:
        tenure = tenure.after(event)
    return tenure


def test_holders_are_of_this_machine_and_change_when_a_plan_is_in_force() -> None:
    assert after(ASSIGNED).holders == {"a", "b", "c"}
    assert after(ASSIGNED, MOVE, decided(2, 7)).holders == {"a", "b", "c"}
    assert after(ASSIGNED, MOVE, decided(2, 7), switched(2)).holders == {"a", "d", "c"}
    assert after(ASSIGNED, MOVE, aborted(2), switched(2)).holders == {"a", "b", "c"}
    assert after(ASSIGNED, MOVE, CRASH).holders == {"a", "b"}


def test_who_was_replaced_goes_at_once_and_who_gave_its_rank_away_after_the_switch() -> None:
    assert after(ASSIGNED).let_go(CRASH) == {"c": LEAVER_LINGERS_S}
    assert after(ASSIGNED).let_go(MOVE) == {}
    assert after(ASSIGNED, MOVE).let_go(decided(2, 7)) == {}
    assert after(ASSIGNED, MOVE, decided(2, 7)).let_go(switched(2)) == {"b": RETIRE_WITHIN_S}


def test_a_joiner_that_is_released_goes_as_well() -> None:
    assert after(ASSIGNED, MOVE).let_go(aborted(2, "d", "a")) == {"d": RETIRE_WITHIN_S}
    assert after(ASSIGNED, MOVE).let_go(aborted(2)) == {}
    assert after(ASSIGNED, MOVE, decided(2, 7)).let_go(aborted(2, "d")) == {}
    back = after(ASSIGNED, MOVE, decided(2, 7)).let_go(CRASH)
    assert back == {"d": RETIRE_WITHIN_S, "c": LEAVER_LINGERS_S}
    assert after(ASSIGNED, MOVE).let_go(CRASH) == {"c": LEAVER_LINGERS_S}


def test_a_machine_is_drained_until_the_last_of_its_interruptions_is_cancelled() -> None:
    once = announced(name="one", machine="m0")
    twice = (once, announced(name="two", machine="m0"))
    assert not after(announced("a"), announced(name="other", machine="m1")).drained
    assert after(once).drained
    assert after(*twice, cancelled("one")).drained
    assert not after(*twice, cancelled("one"), cancelled("two")).drained
    assert not after(cancelled("one"), once).drained
