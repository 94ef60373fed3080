"""Workers' output: every line with its rank before it, the last lines kept, a raw copy on disk."""

import asyncio
import contextlib
import os
import re
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TextIO

from trainmover.agent.tracebacks import Folded

Show = Callable[[str, TextIO], None]
"""Write a line to stdout or stderr."""

KEPT_LINES = 200
MAX_LINE_BYTES = 16 * 1024
_LINE_END = re.compile(rb"\r\n|\n|\r")
"""A carriage return ends a line too: progress bars use nothing else."""


class Lines(asyncio.Protocol):
    """Cuts a byte stream into lines of at most `MAX_LINE_BYTES` and hands them on."""

    def __init__(
        self,
        on_line: Callable[[bytes], None],
        on_raw: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        self._on_line = on_line
        self._on_raw = on_raw
        self._on_end = on_end
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        self._on_raw(data)
        *lines, self._rest = _LINE_END.split(self._rest + data)
        for line in lines:
            self._on_line(line)
        if len(self._rest) >= MAX_LINE_BYTES:
            self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        self._flush()
        self._on_end()

    def _flush(self) -> None:
        if self._rest:
            self._on_line(self._rest)
        self._rest = b""


class Output:
    """Output of one worker. `label` is asked at each line, since a standby becomes a rank."""

    def __init__(
        self,
        worker: str,
        label: Callable[[], str],
        show: Show,
        log_dir: Path | None,
        shown: set[int],
    ) -> None:
        """`shown`: tracebacks that were shown already (tracebacks.py)."""
        self._label = label
        self._folded = Folded(shown)
        self._show = show
        self._open = 0
        self._ended = asyncio.Event()
        self._file: BinaryIO | None = None
        self.tail: deque[str] = deque(maxlen=KEPT_LINES)
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
            self._file = (log_dir / f"{worker}.log").open("ab", buffering=0)

    async def read(self, out_fd: int, err_fd: int) -> None:
        """Take over the read ends of the worker's pipes; returns at once."""
        self._open = 2
        await self._read(out_fd, sys.stdout)
        await self._read(err_fd, sys.stderr)

    async def ended(self) -> None:
        """Blocks until both pipes are at their end: the worker and its children are gone."""
        await self._ended.wait()

    async def _read(self, fd: int, stream: TextIO) -> None:
        def lines() -> Lines:
            return Lines(lambda line: self._take(line, stream), self._keep_raw, self._end)

        pipe = os.fdopen(fd, "rb", buffering=0)
        await asyncio.get_running_loop().connect_read_pipe(lines, pipe)

    def _take(self, line: bytes, stream: TextIO) -> None:
        text = line.decode(errors="replace")
        self.tail.append(text)
        for shown in self._folded.feed(text) if stream is sys.stderr else (text,):
            self._show(f"[{self._label()}] {shown}", stream)

    def _keep_raw(self, data: bytes) -> None:
        if self._file is not None:
            self._file.write(data)

    def _end(self) -> None:
        self._open -= 1
        if self._open:
            return
        for text in self._folded.rest():
            self._show(f"[{self._label()}] {text}", sys.stderr)
        self._ended.set()
        if self._file is not None:
            self._file.close()


def show_plain(line: str, stream: TextIO) -> None:
    """A line at once; when who reads it has gone, training goes on."""
    with contextlib.suppress(BrokenPipeError):
        print(line, file=stream, flush=True)


def label(worker: str, *, rank: int | None, phase: str) -> str:
    """`rank 1`, `standby w5`, or `w5` before it is either."""
    short = worker.rpartition("-")[2]
    if rank is not None:
        return f"rank {rank}"
    return f"standby {short}" if phase in ("shadow", "standby") else short
