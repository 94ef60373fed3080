"""Lanes: one FIFO of jobs, run by its thread or by who waits for the next one."""

import threading
from collections.abc import Callable

import pytest

from trainmover.runtime.admission import Issued
from trainmover.runtime.alarm import Alarm
from trainmover.runtime.work import Lane, LinkWork

WITHIN_S = 10.0


Ran = list[tuple[str, int]]


def job(ran: Ran, name: str) -> Callable[[], None]:
    return lambda: ran.append((name, threading.get_ident()))


def test_who_waits_for_the_job_that_is_next_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)  # it never comes
    lane = Lane("test")
    ran: Ran = []
    first, second = job(ran, "first"), job(ran, "second")
    lane.submit(first)
    lane.submit(second)
    lane.help(second)
    assert ran == []
    lane.help(first)
    lane.help(second)
    lane.help(first)
    assert ran == [(name, threading.get_ident()) for name in ("first", "second")]


def test_a_job_that_runs_is_left_alone_and_the_next_comes_after_it() -> None:
    lane = Lane("test")
    ran: Ran = []
    begun, go = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert go.wait(WITHIN_S)
        ran.append(("slow", 0))

    second = job(ran, "second")
    lane.submit(slow)
    lane.submit(second)
    assert begun.wait(WITHIN_S)
    lane.help(slow)
    lane.help(second)
    assert not lane.claim()
    assert ran == []
    go.set()
    lane.close(WITHIN_S)
    assert [name for name, _ in ran] == ["slow", "second"]


def test_what_was_submitted_while_the_lane_was_claimed_runs_once_it_is_given_back() -> None:
    lane = Lane("test")
    ran: Ran = []
    done = threading.Event()
    assert lane.claim()
    lane.submit(job(ran, "first"))
    lane.submit(done.set)
    assert not lane.claim()
    assert ran == []
    lane.release()
    assert done.wait(WITHIN_S)
    lane.close(WITHIN_S)
    assert [name for name, _ in ran] == ["first"]


def test_a_lane_whose_job_does_not_end_says_so() -> None:
    lane, go = Lane("stuck"), threading.Event()

    def stuck() -> None:
        go.wait(WITHIN_S)

    lane.submit(stuck)
    with pytest.raises(TimeoutError, match="stuck"):
        lane.close(0.01)
    go.set()
    lane.close(WITHIN_S)


def test_a_job_that_nobody_waits_for_runs_in_the_thread_of_the_lane() -> None:
    lane, done = Lane("test"), threading.Event()
    ran: Ran = []
    lane.submit(job(ran, "alone"))
    lane.submit(done.set)
    assert done.wait(WITHIN_S)
    lane.close(WITHIN_S)
    assert [name for name, thread in ran if thread != threading.get_ident()] == ["alone"]


def test_a_lane_leaves_time_to_help_unless_it_is_told_to_hurry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Alarm, "soon", Alarm.off)  # it never comes
    lane, done = Lane("test"), threading.Event()
    ran: Ran = []
    first = job(ran, "first")
    lane.submit(first)
    lane.help(first)
    assert ran == [("first", threading.get_ident())]
    lane.submit(done.set)
    lane.hurry()
    assert done.wait(WITHIN_S)
    lane.close(WITHIN_S)


@pytest.mark.parametrize("ask", [LinkWork.is_completed, LinkWork.get_future])
def test_who_asks_for_the_end_of_a_work_without_helping_hurries_it(
    ask: Callable[[LinkWork], object],
) -> None:
    work, hurried = LinkWork(Issued("g", "all_reduce", "", ()), []), threading.Event()
    work.hurry = hurried.set
    ask(work)
    assert hurried.is_set()


def test_the_last_setting_of_an_alarm_counts() -> None:
    alarm, woken = Alarm(), threading.Event()

    def sleep() -> None:
        alarm.wait()
        woken.set()

    thread = threading.Thread(target=sleep)
    alarm.now()
    alarm.off()
    thread.start()
    assert not woken.is_set()
    alarm.soon()
    assert woken.wait(WITHIN_S)
    thread.join()
    alarm.close()
