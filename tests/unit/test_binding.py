"""What a script may know of its rank before the first step."""

import pytest

from trainmover.runtime.binding import Binding
from trainmover.schemas.layout import Layout


def test_a_script_without_the_promise_may_always_ask() -> None:
    Binding(rebindable=False).check("ctx.rank")


def test_a_rebindable_script_may_not_know_its_rank_in_set_up() -> None:
    with pytest.raises(RuntimeError, match=r"ctx\.rank is not known.*ctx\.on_assigned"):
        Binding(rebindable=True).check("ctx.rank")


def test_a_rebindable_script_may_ask_once_the_rank_is_fixed() -> None:
    Binding(rebindable=True, open=False).check("ctx.rank")


def test_a_rebindable_script_may_ask_where_it_is_asked_again() -> None:
    binding = Binding(rebindable=True)
    with binding.asking():
        with binding.asking():
            binding.check("ctx.rank")
        binding.check("ctx.rank")
    with pytest.raises(RuntimeError, match="before the first step"):
        binding.check("ctx.rank")


def test_an_error_in_a_place_that_may_ask_does_not_leave_it_open() -> None:
    binding = Binding(rebindable=True)
    with pytest.raises(KeyError), binding.asking():
        raise KeyError
    with pytest.raises(RuntimeError, match="before the first step"):
        binding.check("ctx.rank")


def test_what_waits_for_the_rank_runs_in_order_and_at_each_assignment() -> None:
    binding = Binding(rebindable=True)
    ran: list[str] = []
    for name in ("first", "second"):

        def function(name: str = name) -> None:
            binding.check("ctx.rank")
            ran.append(name)

        binding.on_assigned.append(function)
    binding.assigned()
    binding.assigned()
    assert ran == ["first", "second"] * 2


@pytest.mark.parametrize(
    ("layout", "a", "b", "same"),
    [
        ("dp=4", 0, 3, True),
        ("dp=2,tp=2", 0, 3, True),
        ("pp=2,dp=2", 0, 1, True),
        ("pp=2,dp=2", 0, 2, False),
        ("dp=2,pp=2", 0, 2, True),
        ("dp=2,pp=2", 0, 3, False),
        ("pp=4", 1, 2, True),
        ("pp=4", 2, 3, False),
    ],
)
def test_a_parked_call_goes_on_for_ranks_of_its_role_class(
    layout: str, a: int, b: int, same: bool
) -> None:
    binding = Binding(rebindable=True)
    assert binding.can_go_on(Layout.parse(layout), a, b) is same
    assert binding.can_go_on(Layout.parse(layout), b, a) is same
    assert not Binding(rebindable=False).can_go_on(Layout.parse(layout), a, b)


def test_who_asked_for_its_stage_goes_on_for_that_stage_only() -> None:
    binding, layout = Binding(rebindable=True), Layout.parse("pp=4,dp=2")
    assert binding.can_go_on(layout, 2, 4)
    binding.check_coordinate("pp", 2, layout)
    assert not binding.can_go_on(layout, 2, 4)
    assert binding.can_go_on(layout, 2, 3)


def test_a_coordinate_that_the_whole_role_class_has_is_known() -> None:
    layout = Layout.parse("dp=2,tp=2")
    binding = Binding(rebindable=True, role_class=lambda rank, at: str(at.coordinate(rank, "tp")))
    binding.check_coordinate("tp", 1, layout)
    with pytest.raises(RuntimeError, match=r"ctx\.coordinate\('dp'\) is not known"):
        binding.check_coordinate("dp", 1, layout)
    with pytest.raises(RuntimeError, match=r"ctx\.coordinate\('tp'\) is not known"):
        Binding(rebindable=True).check_coordinate("tp", 1, layout)
