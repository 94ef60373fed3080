"""When a service that dies again and again is given up."""

import signal

import pytest

from trainmover.cli.children import FROM_OUTSIDE, MAX_DEATHS, WITHIN_S, Deaths


@pytest.mark.parametrize("code", [1, 6, -signal.SIGSEGV, -signal.SIGABRT])
def test_a_service_that_ends_by_itself_too_often_is_in_a_loop(code: int) -> None:
    deaths = Deaths()
    told = [deaths.in_a_loop(code, now_s=float(n)) for n in range(MAX_DEATHS)]
    assert told == [False] * (MAX_DEATHS - 1) + [True]


@pytest.mark.parametrize("number", FROM_OUTSIDE)
def test_a_service_that_others_end_is_in_no_loop_however_often(number: signal.Signals) -> None:
    deaths = Deaths()
    for n in range(4 * MAX_DEATHS):
        assert not deaths.in_a_loop(-number, now_s=float(n))
        assert not deaths.in_a_loop(128 + number, now_s=float(n))
    assert not deaths.in_a_loop(1, now_s=100.0)


def test_deaths_that_are_far_apart_are_no_loop() -> None:
    deaths = Deaths()
    apart_s = WITHIN_S / (MAX_DEATHS - 1)
    assert not any(deaths.in_a_loop(1, now_s=n * apart_s) for n in range(3 * MAX_DEATHS))
