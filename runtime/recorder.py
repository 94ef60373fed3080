"""Writes a tape while set-up and shadow steps run for real, and leaves nothing behind.

The hook is an attribute of each group's engine in front of its method `issue`; with the attribute
gone a call takes the path that it took before.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import structlog
import torch
from torch import Tensor

from trainmover.runtime.admission import Issued
from trainmover.runtime.collectives import Ring
from trainmover.runtime.engine import LinkEngine
from trainmover.runtime.exchange import Call
from trainmover.runtime.tape import MAX_BYTES, Entry, Key, Tape, is_kept
from trainmover.runtime.wire import Op
from trainmover.runtime.work import LinkWork

log = structlog.get_logger()


class Recorder:
    """Collectives may come from any thread; the rest is called by the training thread."""

    def __init__(self, crosses: Callable[[Sequence[int]], bool]) -> None:
        """Of groups whose ranks do not leave the replaced unit (`crosses`) no values are kept."""
        self._crosses = crosses
        self._engines: list[LinkEngine] = []
        self._groups: list[list[Entry]] = []
        self._sizes: list[int] = []
        self._starts: list[tuple[int, ...]] = []
        self._left = MAX_BYTES
        self._whole = True
        self._paused = False
        self._lock = threading.Lock()

    def attach(self, engine: LinkEngine) -> None:
        """Record the next group of this rank."""
        entries: list[Entry] = []
        self._engines.append(engine)
        self._groups.append(entries)
        self._sizes.append(len(engine.ranks))
        issue = partial(self._issue, engine, entries, self._crosses(engine.ranks))
        engine.issue = issue  # type: ignore[method-assign]

    def detach(self) -> None:
        """Every group is as if it had never been recorded."""
        for engine in self._engines:
            del engine.issue
        self._engines.clear()

    def begin_step(self) -> None:
        """What comes now belongs to the next shadow step."""
        self._starts.append(tuple(len(entries) for entries in self._groups))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The collectives in here are the runtime's own."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def tape(self, key: Key) -> Tape:
        """What was recorded; every collective must have ended."""
        groups, sizes = tuple(map(tuple, self._groups)), tuple(self._sizes)
        return Tape(key, groups, sizes, tuple(self._starts), self._whole)

    def _issue(
        self,
        engine: LinkEngine,
        entries: list[Entry],
        crosses: bool,
        issued: Issued,
        op: Op,
        outputs: list[Tensor],
        run: Callable[[Call, Ring], None],
        echo: Callable[[], None],
        *rest: Any,
    ) -> LinkWork:
        """In the place of `LinkEngine.issue`."""
        if not self._paused:
            entry = Entry(issued.op, issued.dtype, issued.shape)
            entries.append(entry)
            if crosses:
                run = partial(self._run, run, entry, outputs)
        return LinkEngine.issue(engine, issued, op, outputs, run, echo, *rest)

    def _run(
        self,
        run: Callable[[Call, Ring], None],
        entry: Entry,
        outputs: list[Tensor],
        call: Call,
        ring: Ring,
    ) -> None:
        """In the lane's thread: whoever waits for the collective may write to its outputs next."""
        run(call, ring)
        for place, output in enumerate(outputs):
            if is_kept(output) and self._afford(output.nbytes):
                entry.values[place] = output.detach().clone(memory_format=torch.contiguous_format)

    def _afford(self, num_bytes: int) -> bool:
        with self._lock:
            fits = self._whole and num_bytes <= self._left
            if fits:
                self._left -= num_bytes
            elif self._whole:
                self._whole = False
                log.warning(
                    "tape.full",
                    limit_bytes=MAX_BYTES,
                    advice="outputs of later collectives are not recorded, standbys make them up",
                )
            return fits
