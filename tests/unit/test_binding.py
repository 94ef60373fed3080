"""What a script may know of its rank before the first step."""

import pytest

from trainmover.runtime.binding import Binding, same_role_class
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
    ],
)
def test_ranks_of_one_pipeline_stage_run_the_same_program(
    layout: str, a: int, b: int, same: bool
) -> None:
    assert same_role_class(Layout.parse(layout), a, b) is same
    assert same_role_class(Layout.parse(layout), b, a) is same
