"""Answers the collectives of a rank that warms up from a tape, without any other rank."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from trainmover.runtime.admission import Issued
from trainmover.runtime.collectives import Ring
from trainmover.runtime.engine import LinkEngine
from trainmover.runtime.exchange import Call
from trainmover.runtime.tape import Entry, Tape, TapeMismatch
from trainmover.runtime.wire import Op
from trainmover.runtime.work import LinkWork


class Replayer:
    """Groups echo; what they echo is overwritten by what was recorded. See `Recorder` for the hook.

    Raises TapeMismatch out of the collective, or out of `begin_step`, where the rank does anything
    else than what the tape says.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._engines: list[LinkEngine] = []
        self._at = [0] * len(tape.groups)
        """Per group, here or on the tape: how many collectives were answered."""
        self._step = -1
        """Shadow step on the tape; -1: set-up."""
        self._tail = False
        self.mismatch: TapeMismatch | None = None
        """The first one: what is between a collective and `train` may make another error of it."""

    def attach(self, engine: LinkEngine) -> None:
        """Answer for the next group of this rank."""
        group = len(self._engines)
        self._engines.append(engine)
        if group == len(self._at):
            self._at.append(0)
        engine.issue = partial(self._issue, engine, group)  # type: ignore[method-assign]

    def detach(self) -> None:
        """Every group is as if it had never been answered for."""
        for engine in self._engines:
            del engine.issue
        self._engines.clear()

    def begin_step(self, *, tail: bool = False) -> None:
        """A shadow step begins. Behind the last one on the tape that one comes again.

        `tail`: it goes on behind the vote, where those on the tape ended.
        """
        self._check_end()
        self._step = min(self._step + 1, len(self._tape.starts) - 1)
        self._tail = tail
        if self._step >= 0:
            starts = self._tape.starts[self._step]
            self._at[: len(starts)] = starts

    def _check_end(self) -> None:
        for group, at in enumerate(self._at):
            if not self._tail and at < (end := self._end(group)):
                entry = self._tape.groups[group][at]
                raise self._mismatch(group, at, str(entry), f"the end of {self._where}", end)

    def _issue(
        self,
        engine: LinkEngine,
        group: int,
        issued: Issued,
        op: Op,
        outputs: list[Tensor],
        run: Callable[[Call, Ring], None],
        echo: Callable[[], None],
        *rest: Any,
    ) -> LinkWork:
        """In the place of `LinkEngine.issue`."""
        if (entry := self._next(group, issued, outputs)) is not None and entry.values:
            echo = partial(_replay, echo, entry, outputs)
        return LinkEngine.issue(engine, issued, op, outputs, run, echo, *rest)

    def _next(self, group: int, issued: Issued, outputs: list[Tensor]) -> Entry | None:
        got = Entry(issued.op, issued.dtype, issued.shape)
        at, end = self._at[group], self._end(group)
        size = len(self._engines[group].ranks)
        if group < len(self._tape.sizes) and size != self._tape.sizes[group]:
            expected = f"a group of {self._tape.sizes[group]} ranks"
            raise self._mismatch(group, at, expected, f"{got} in one of {size}", end)
        if at >= end:
            if self._tail:
                return None
            raise self._mismatch(group, at, f"the end of {self._where}", str(got), end)
        self._at[group] = at + 1
        entry = self._tape.groups[group][at]
        if (entry.op, entry.dtype, entry.shape) != (got.op, got.dtype, got.shape):
            raise self._mismatch(group, at, str(entry), str(got), end)
        for place, value in entry.values.items():
            shapes = [tuple(output.shape) for output in outputs]
            if place >= len(shapes) or shapes[place] != tuple(value.shape):
                expected = f"{entry} with output {place} of {list(value.shape)}"
                raise self._mismatch(group, at, expected, f"outputs {shapes}", end)
        return entry

    def _end(self, group: int) -> int:
        """Of what belongs to this shadow step on the tape."""
        tape = self._tape
        if group >= len(tape.groups):
            return 0
        if self._step + 1 < len(tape.starts):
            return tape.starts[self._step + 1][group]
        return len(tape.groups[group])

    @property
    def _where(self) -> str:
        return "set-up" if self._step < 0 else f"shadow step {self._step}"

    def _mismatch(self, group: int, at: int, expected: str, got: str, end: int) -> TapeMismatch:
        name = self._engines[group].channel if group < len(self._engines) else "not made"
        mismatch = TapeMismatch(
            f"group {group} ({name}), collective {at} of {end} in {self._where}: expected "
            f"{expected}, got {got}"
        )
        self.mismatch = self.mismatch or mismatch
        return mismatch


def _replay(echo: Callable[[], None], entry: Entry, outputs: list[Tensor]) -> None:
    echo()
    for place, value in entry.values.items():
        outputs[place].copy_(value)
