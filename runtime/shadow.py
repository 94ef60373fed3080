"""The steps before the first real one: nothing that they compute stays."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

import structlog
import torch
import torch.distributed as dist

from trainmover.runtime.aborts import StepAborted
from trainmover.runtime.admission import Issued, Mode
from trainmover.runtime.block import Block
from trainmover.runtime.recorder import Recorder
from trainmover.runtime.recovery import Rerun, Retired
from trainmover.runtime.replayer import Replayer
from trainmover.runtime.step import Step
from trainmover.runtime.tape import Tape, TapeMismatch, TapeUnusable, crosses
from trainmover.runtime.tapes import Tapes

if TYPE_CHECKING:
    from trainmover.runtime.performance import Performance

log = structlog.get_logger()

MIN_SHADOW, MAX_SHADOW = 2, 5
"""DDP needs 2 steps to settle, with static_graph 3 (measured; docs/design/standby.md)."""

NUMBERS_APART = 1 << 20
"""Of collectives of one shadow step and of the next."""


class Shadow:
    """Shadow steps of one run of `train`, and the tape that they write or are answered from.

    In a live set-up they communicate, and all ranks take the same number. Elsewhere they do not:
    groups answer by themselves, or from a tape.
    """

    def __init__(self, run: "Performance", tapes: Tapes | None, tape: Tape | None) -> None:
        role = run.role
        self._run, self._tapes = run, tapes
        self._recorder = self._replayer = None
        classes = run.binding.classes(role.layout)
        speaks = any(each.representative == role.rank for each in classes)
        if role.live and speaks and tapes is not None:
            placement, unit = role.placement, run.env.unit
            self._recorder = Recorder(lambda ranks: crosses(ranks, placement, unit))
        elif not role.live and tape is not None:
            self._replayer = Replayer(tape)
        self.replays = self._replayer is not None
        """What groups answer is on a tape."""
        self.count = 0
        """How many were made."""
        self.tape_name = ""
        """Of what was recorded and stored."""

    @property
    def hook(self) -> Recorder | Replayer | None:
        """What stands in front of the groups until the last shadow step is over."""
        return self._recorder or self._replayer

    @property
    def mismatch(self) -> TapeMismatch | None:
        """What it did first that is not on its tape, whatever error came of that."""
        return self._replayer.mismatch if self._replayer is not None else None

    def steps(self) -> Iterator[Step]:
        """Until two in a row issue the same collectives, on every rank. Raises Rerun, Retired."""
        run, admission = self._run, self._run.admission
        trace: list[Issued] | None = None
        for count in range(1, MAX_SHADOW + 1):
            self._leave_if_told()
            self._begin(count)
            admission.trace = []
            yield self._block()
            self._check()
            before, trace, admission.trace = trace, admission.trace, None
            if count >= MIN_SHADOW and self._agreed(before == trace):
                break
        if run.role.live:
            self._number_from(count + 1)
        else:
            # Lazy optimizer state and its kernels; a donor's state overwrites what it computes.
            if self._replayer is not None:
                self._replayer.begin_step(tail=True)
            run.let_update = True
            yield self._block()
            self._check()
            run.let_update = False
        if self.hook is not None:
            self.hook.detach()
        self._replayer = None  # a parked standby does not keep a tape in memory

    def _begin(self, count: int) -> None:
        if self.hook is not None:
            self.hook.begin_step()
        if self._run.role.live:
            self._number_from(count)

    def _number_from(self, count: int) -> None:
        """A shadow step ends at the vote: what one rank sent before it and another would have
        received behind it must not reach the next step."""
        for group in self._run.factory.groups:
            group.engine.count_from(count * NUMBERS_APART)

    def store(self) -> None:
        """Blocks until the bus has what was recorded. Without it standbys make it up."""
        if self._recorder is None or self._tapes is None:
            return
        tape = self._recorder.tape(self._tapes.key(self._run.role.role_class))
        self._recorder = None
        try:
            self.tape_name = self._tapes.put(tape)
        except TapeUnusable as error:
            log.warning("tape.not_stored", reason=str(error))
        else:
            log.info("tape.stored", name=self.tape_name, num_bytes=tape.num_bytes)

    def _block(self) -> Block:
        self.count += 1
        return Block(self._run, 0, closing=self._run.loop.total == 0, shadow=True)

    def _check(self) -> None:
        """Raises TapeMismatch also where code of others made something else of it."""
        if self.mismatch is not None:
            raise self.mismatch

    def _agreed(self, stable: bool) -> bool:
        """Whether it holds for all ranks. Collective in a live set-up, outside trace and tape."""
        run = self._run
        if not run.role.live:
            return stable
        answer = torch.tensor([stable], dtype=torch.uint8)
        run.admission.mode = Mode.SETUP
        try:
            with self._recorder.paused() if self._recorder is not None else nullcontext():
                dist.all_reduce(answer, dist.ReduceOp.MIN)
        except StepAborted as aborted:
            log.info("shadow.cut", cause=aborted.cause)
        finally:
            run.admission.mode = Mode.CLOSED
        self._leave_if_told()
        return bool(answer)

    def _leave_if_told(self) -> None:
        """A standby that is wanted elsewhere, or a set-up that is cut, does not go on."""
        run = self._run
        seat, role = run.seat, run.role
        with seat.cond:
            decided, ahead = seat.decided, seat.ahead.due
            if seat.retired is not None:
                raise Retired(seat.retired)
            if decided and (decided.setup_again or role.generation == 0):
                raise Rerun
            if (ahead or seat.outdated) and role.generation == 0:
                raise Rerun
        if role.live and run.generation_ended:
            raise Rerun
