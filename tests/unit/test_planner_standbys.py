"""Which standby takes over: one that is warm for what the rank does, if there is one."""

import pytest
from tests.unit.planner_histories import J, failed, outputs, ready, running, the_plan

from trainmover.schemas.base import Event
from trainmover.schemas.events import StandbyMismatched, StandbyWarmed

ROLES = tuple(
    (2.0, ready(worker, rank).model_copy(update={"role_class": name}))
    for rank, (worker, name) in enumerate(zip("abc", ("first", "middle", "last"), strict=True))
)


def warmed(worker: str, *role_classes: str) -> list[tuple[float, Event]]:
    return [
        (3.0, StandbyWarmed(**J, worker=worker, rank=0, warm_s=1.0, role_class=name))
        for name in role_classes
    ]


def cold(worker: str, role_class: str) -> tuple[float, Event]:
    event = StandbyMismatched(
        **J, worker=worker, rank=0, role_class=role_class, tape="t", reason="other shapes"
    )
    return (4.0, event)


@pytest.mark.parametrize(("dead", "joiner"), [("a", "d"), ("b", "e"), ("c", "f")])
def test_warm_for_the_role_class_comes_before_warm_before_cold(dead: str, joiner: str) -> None:
    warm = [*warmed("d", "first", "all"), *warmed("e", "middle"), *warmed("f", "last")]
    state = running(*ROLES, *warm, (9.0, failed(dead)), standbys="defg")
    assert the_plan(outputs(state)).replacements[0].joiner == joiner


def test_warm_for_another_role_class_comes_before_cold() -> None:
    state = running(*ROLES, *warmed("e", "middle"), (9.0, failed("c")), standbys="de")
    assert the_plan(outputs(state)).replacements[0].joiner == "e"


def test_who_is_cold_for_the_role_class_after_all_still_takes_a_rank() -> None:
    warm = [*warmed("d", "first", "middle"), *warmed("e", "middle")]
    state = running(*ROLES, *warm, cold("d", "middle"), (9.0, failed("b")), standbys="de")
    assert the_plan(outputs(state)).replacements[0].joiner == "e"
    alone = running(*ROLES, *warm, cold("d", "middle"), (9.0, failed("b")), standbys="d")
    assert the_plan(outputs(alone)).replacements[0].joiner == "d"


def test_of_several_dead_ranks_each_gets_who_is_warm_for_it() -> None:
    warm = [*warmed("d", "last"), *warmed("e", "first")]
    state = running(*ROLES, *warm, (9.0, failed("a", "c")), standbys="de")
    found = {r.leaver: r.joiner for r in the_plan(outputs(state)).replacements}
    assert found == {"a": "e", "c": "d"}
