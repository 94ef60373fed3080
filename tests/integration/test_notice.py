"""SIGTERM as a notice: the first one tells, the second ends; a standby and a child just end."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress

import pytest

from trainmover.runtime.notice import on_sigterm


def end_of(work: Callable[[], None]) -> int:
    """Of a forked child that does `work`: its exit code, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            work()
            os._exit(0)
        os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def told(times: int, *, idle: bool = False) -> None:
    heard: list[int] = []
    on_sigterm(lambda: heard.append(1), lambda: idle)
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGTERM)
    os._exit(10 + len(heard))


@pytest.mark.parametrize(
    ("work", "end"),
    [
        (lambda: told(0), 10),
        (lambda: told(1), 11),
        (lambda: told(2), -signal.SIGTERM),
        (lambda: told(1, idle=True), -signal.SIGTERM),
    ],
)
def test_the_first_is_told_and_the_second_ends(work: Callable[[], None], end: int) -> None:
    assert end_of(work) == end


def test_a_child_of_the_worker_ends_at_the_first() -> None:
    def forks() -> None:
        on_sigterm(lambda: os._exit(5), lambda: False)
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(6)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os._exit(7 if status == -signal.SIGTERM else 8)

    assert end_of(forks) == 7


def test_a_handler_of_the_script_stays() -> None:
    def has_its_own() -> None:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(12))
        told(1)

    assert end_of(has_its_own) == 12
