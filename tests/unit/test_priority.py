"""A low priority that is only taken where it can be given back."""

import os
import threading
from collections.abc import Iterator

import pytest

from trainmover.runtime import priority
from trainmover.runtime.priority import LOW, Lowered


@pytest.fixture
def other_thread() -> Iterator[int]:
    """A thread that was there before."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait, args=(30,))
    thread.start()
    assert thread.native_id is not None
    yield thread.native_id
    end.set()
    thread.join()


def all_of_them() -> set[int | None]:
    return {priority.of(thread) for thread in priority.threads()} - {None}


def made_now() -> int | None:
    found: list[int | None] = []
    thread = threading.Thread(target=lambda: found.append(priority.of(threading.get_native_id())))
    thread.start()
    thread.join()
    return found[0]


def test_every_thread_is_low_until_all_are_back(other_thread: int) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    lowered = Lowered()
    if all_of_them() == {before}:
        pytest.skip("this system does not let a priority back")
    assert all_of_them() == {LOW}
    assert made_now() == LOW
    assert priority.of(other_thread) == LOW
    lowered.restore()
    lowered.restore()
    assert all_of_them() == {before}


def test_what_could_not_be_given_back_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, other_thread: int
) -> None:
    before, lower = os.getpriority(os.PRIO_PROCESS, 0), os.setpriority
    ours = {threading.get_native_id(), other_thread}

    def only_down(which: int, who: int, nice: int) -> None:
        if nice < os.getpriority(which, who):
            raise PermissionError
        lower(which, who, nice)

    monkeypatch.setattr(os, "setpriority", only_down)
    lowered = Lowered()
    assert {priority.of(thread) for thread in ours} == {before}
    lowered.restore()
    assert {priority.of(thread) for thread in ours} == {before}
