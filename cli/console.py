"""One place writes to the terminal: workers' lines, our own, a status line that is rewritten."""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from typing import TextIO

from trainmover.agent.output import show_plain

MARK = "trainmover: "
"""Before each line of our own."""
_ERASE = "\r\x1b[K"


class Console:
    """Not thread-safe. Our own lines and the status go to stderr; workers' where they wrote."""

    def __init__(self) -> None:
        self.live = sys.stdout.isatty() and sys.stderr.isatty()
        self._status = ""

    def show(self, line: str, stream: TextIO) -> None:
        """A line above the status line."""
        if not self._status:
            show_plain(line, stream)
            return
        self._write(_ERASE)
        show_plain(line, stream)
        self._write(self._status)

    def say(self, text: str) -> None:
        """Something of our own, each line marked."""
        for line in text.splitlines():
            self.show(MARK + line, sys.stderr)

    def status(self, text: str) -> None:
        """Rewrite the last line of the terminal; empty takes it away."""
        if not self.live:
            return
        width = shutil.get_terminal_size().columns
        self._status = text[: width - 1]
        self._write(_ERASE + self._status)

    def _write(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            sys.stderr.write(text)
            sys.stderr.flush()


def for_reader(work: Callable[[], int]) -> int:
    """What it prints may go to `head`, which ends when it has enough: no error of ours."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 0
