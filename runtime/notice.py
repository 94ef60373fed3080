"""SIGTERM to a worker that holds a rank is notice that it is to go, and not its end."""

import contextlib
import os
import signal
from collections.abc import Callable
from types import FrameType


def on_sigterm(tell: Callable[[], None], idle: Callable[[], bool]) -> None:
    """Have the first SIGTERM call `tell`, in the main thread, where the process would have ended.

    `tell` runs between any two bytecodes of the training thread: it may neither block nor take a
    lock. A second SIGTERM ends the process; so does the first if it is `idle`, and in a process
    that was forked from this one. A handler that the script has installed stays.
    """
    owner = os.getpid()

    def handle(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != owner or idle():
            os.kill(os.getpid(), number)
        else:
            tell()

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        with contextlib.suppress(ValueError):  # not the main thread: it ends as before
            signal.signal(signal.SIGTERM, handle)
