"""`with step:` -- one optimizer update with all its micro-batches, done once or undone whole."""

from types import TracebackType
from typing import TYPE_CHECKING

import structlog
from torch.optim.optimizer import Optimizer

from trainmover.runtime import commit, dtensors
from trainmover.runtime.aborts import StepAborted
from trainmover.runtime.admission import Mode
from trainmover.runtime.ballot import Ballot
from trainmover.runtime.commit import Phase
from trainmover.runtime.fence import Revoked
from trainmover.runtime.link import LinkBroken
from trainmover.runtime.recovery import SAY_EVERY_S, Retired
from trainmover.runtime.remains import forget_losses
from trainmover.runtime.step import Step

if TYPE_CHECKING:
    from trainmover.runtime.performance import Performance

log = structlog.get_logger()

MADE_UP = (
    "This worker sets up without a tape of its role class: groups answer by themselves, and what "
    "was received is made up. Guard what depends on it by step.shadow. Objects cannot be made up: "
    "a PipelineStage of torch without input_args and output_args asks its neighbours for shapes"
)


class Block(Step):
    """A block of a job: committed by the vote of all ranks, or undone and given out again."""

    def __init__(self, run: "Performance", number: int, *, closing: bool, shadow: bool) -> None:
        super().__init__(run, number, closing=closing, shadow=shadow)
        self._run = run
        self._voted = False
        self._known = False
        self._let_update = False
        self._reported_before: dict[str, float] = {}
        self._averages: dict[str, float] = {}

    def ready(self, optimizer: Optimizer | None = None) -> None:
        """The vote. Raises StepAborted when the step is undone."""
        run = self._run
        if optimizer is not None and run.tracked.before_first_optimizer(optimizer):
            return
        if self._voted:
            if not self._known and not self._let_update:
                raise StepAborted("the step was aborted in its vote")
            return
        if not self.shadow:
            dtensors.sum_partial(run.tracked.dtensors)
        self._voted = True
        if self.shadow:
            if not self._let_update:
                raise StepAborted("a shadow step is never applied")
            return
        self._vote()
        self._known = True
        run.poisoned = 0
        run.watch_the_tail()
        if run.before_update:
            run.before_update()
            run.before_update = None

    # ---- the vote

    def _vote(self) -> None:
        run = self._run
        fence = run.links.data_fence
        if fence.revoked:
            run.vote.abort(self.number)
            raise StepAborted(fence.cause)
        own = Ballot(
            stop=run.stop_wanted,
            freeze=run.seat.freeze(),
            numbers={k: (v, 1) for k, v in run.reported.items()},
            replicas=run.replica_digests,
        )
        run.beat("vote")
        try:
            total = run.vote.vote(self.number, own, run.tracked.own(), run.hit)
        except (Revoked, LinkBroken) as error:
            self._cut_off(error)
            return
        if total.failed:
            raise StepAborted("a rank cannot finish this step")
        run.reported.clear()
        run.replica_digests = {}
        if total.differing:
            raise RuntimeError(
                f"ranks that should hold the same differ in {', '.join(total.differing)} after "
                f"{self.number} steps. Either it is not the same on all of them (say so by "
                "ctx.track(..., sharded_over=(axis, ...))), or something that changes it is not "
                "tracked and did not move with a rank (a scheduler, an average, a counter)"
            )
        self._averages = total.averages
        run.averages = total.averages or run.averages
        self.stopping = total.stop

    def _cut_off(self, error: Revoked | LinkBroken) -> None:
        """The generation ended in the middle of the vote."""
        run = self._run
        if isinstance(error, LinkBroken):
            run.link_broken(error.peer_rank, error.peer_worker, error.channel, str(error))
        phase = run.seat.move(commit.failed).phase
        if phase is Phase.APPLYING:
            return
        if phase is not Phase.HOLDING:
            raise StepAborted(str(error))
        self._hold()

    def _hold(self) -> None:
        """Stay in the hook, gradients intact, until a decision says commit or retry."""
        run = self._run
        seat = run.seat
        run.beat("hold")
        while not seat.wait(
            lambda: seat.retired is not None or _decision(run) is not None, SAY_EVERY_S
        ):
            log.warning("step.held", step=self.number, waits_for="the mover's decision")
        with seat.cond:
            if seat.retired is not None:
                raise Retired(seat.retired)
            decided = _decision(run)
            assert decided is not None
            if decided == seat.position.committed + 1:
                after = commit.obey(seat.position, seat.orders.about, decided)
                assert after is not None
                seat.position = after
                seat.notify()
                return
        raise StepAborted("no rank is known to have committed this step")

    # ---- the block

    def _open(self) -> None:
        run = self._run
        self._let_update = run.let_update
        self._reported_before = dict(run.reported)
        run.tracked.open()
        if not self.shadow:
            run.compare_replicas()
            run.send_late_extras(self.number)
        run.gate.block = self
        run.admission.mode = Mode.ECHO if self.shadow and not run.role.live else Mode.BLOCK
        phase = "shadow" if self.shadow else "step"
        if run.phase != phase:  # as a rule the commit before has said so
            run.beat(phase)
        if not self.shadow:
            run.arm(self.number)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> bool:
        run = self._run
        try:
            if error is None and not self._voted:
                self.ready()
        except (StepAborted, Retired) as aborted:
            error = aborted
        try:
            return self._close(error)
        finally:
            run.gate.block = None
            run.admission.mode = Mode.CLOSED

    def _close(self, error: BaseException | None) -> bool:
        run = self._run
        if isinstance(error, Retired):
            raise error
        if self.shadow:
            cut = run.role.live and run.generation_ended and isinstance(error, Exception)
            if error is not None and not cut and not isinstance(error, StepAborted):
                made_up = not run.role.live and not run.shadow.replays
                if made_up and any(i.op == "send" for i in run.admission.trace or ()):
                    error.add_note(MADE_UP)
                return False
            run.settle()
            run.tracked.undo()
            return True
        undone = isinstance(error, StepAborted) or (
            isinstance(error, Exception) and run.generation_ended
        )
        if error is not None and not undone:
            return False
        if self._known:
            # TAIL: what was poisoned after the vote, or cut short by it, is state.
            self._commit(poisoned=run.poisoned > 0 or error is not None)
        else:
            self._undo(error)
        return True

    def _commit(self, *, poisoned: bool) -> None:
        run = self._run
        run.hit("commit")
        if self.stopping:
            run.loop.end_at(self.number + 1)
        last = self.number + 1 >= run.loop.blocks
        run.seat.move(lambda p: commit.applied(p, poisoned=poisoned, last=last))
        self.committed = True
        run.committed(self, poisoned=poisoned, numbers=self._averages)

    def _undo(self, error: BaseException | None) -> None:
        run = self._run
        if not self._voted:
            run.vote.abort(self.number)
        run.seat.move(commit.failed)
        forget_losses()
        run.tracked.undo()
        run.reported = self._reported_before
        cause = error.cause if isinstance(error, StepAborted) else repr(error)
        run.news.aborted(self.number, cause)


def _decision(run: "Performance") -> int | None:
    """Committed steps that the decision still to obey names. Lock held."""
    decided = run.seat.decided
    if decided is None:
        return None
    return -1 if decided.setup_again else decided.target
