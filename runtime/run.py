"""`trainmover.run(train)`: runs `train` for whatever role this worker gets, again if need be."""

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial

import structlog

from trainmover.runtime import aborts, unprotected
from trainmover.runtime.binding import Binding
from trainmover.runtime.commit import Phase
from trainmover.runtime.context import Context
from trainmover.runtime.control import Control
from trainmover.runtime.endpoint import Connection
from trainmover.runtime.fence import Revoked
from trainmover.runtime.links import Links
from trainmover.runtime.loop import left_early
from trainmover.runtime.notice import on_sigterm
from trainmover.runtime.performance import Performance
from trainmover.runtime.recovery import (
    SAY_EVERY_S,
    SWITCH_S,
    Rerun,
    Retired,
    serve_extras,
    serve_state,
)
from trainmover.runtime.reporting import Reporter
from trainmover.runtime.seat import Role
from trainmover.runtime.standing import Standing
from trainmover.runtime.tape import TapeMismatch
from trainmover.runtime.tapes import Tapes
from trainmover.runtime.warming import WARM_S
from trainmover.schemas.commands import Stage, Switch
from trainmover.schemas.environment import WorkerEnvironment
from trainmover.schemas.events import (
    InterruptionAnnounced,
    StandbyMismatched,
    StepAborted,
    UserError,
    WorkerFinished,
    WorkerRegistered,
)
from trainmover.schemas.local import Crash
from trainmover.schemas.roles import RoleClassOf
from trainmover.telemetry import logs, spans
from trainmover.telemetry.spans import FLUSH_S, Tracer

log = structlog.get_logger()

SWITCH_INTERVAL_S = 0.0001
"""CPython's thread switch interval: at its 5 ms a communication thread waits 100 times longer
beside a training thread that runs Python (measured; docs/design/groups.md)."""

MAX_REASON = 4000
TURN_S = 0.2
"""A standby looks so often whether another one of its machine has warmed up."""

LOG_LEVEL = "TRAINMOVER_LOG"
"""debug, info, warning (default), error: what workers say about themselves on stderr."""

Train = Callable[[Context], None]


def run(train: Train, *, rebindable: bool = False, role_class: RoleClassOf | None = None) -> None:
    """Runs `train(ctx)` until the job is over. Blocks; returns on ranks that finished, else exits.

    `rebindable` promises that nothing made before the first step depends on the rank within its
    role class: a promoted standby then goes on without running `train` again. It is checked.
    `role_class(rank, layout)` names the class of each rank, the same on every worker: ranks of one
    run the same collectives on the same shapes, and standbys warm up once for each. Default: the
    first, the middle and the last stages of a pipeline (axis `pp`).

    Raises what `train` raises. Outside a job it runs unprotected, as the only rank or as one of
    those that torchrun has started, and says so.
    """
    env = WorkerEnvironment.read(os.environ)
    if env is not None:
        _work(env, train, rebindable, role_class)
        return
    try:
        unprotected.perform(train, rebindable=rebindable, role_class=role_class)
    except Exception as error:
        _advise(error)
        raise


def _work(
    env: WorkerEnvironment, train: Train, rebindable: bool, role_class: RoleClassOf | None
) -> None:
    about = {"job": env.job, "run": env.run, "machine": env.machine, "worker": env.worker}
    subject = logs.configure(
        os.environ.get(LOG_LEVEL, "warning"), as_json=logs.json_wanted(os.environ), about=about
    )
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    worker = _Worker(env, rebindable, role_class, _tracer(about))
    subject.facts = worker.facts
    try:
        worker.work(train)
    except Retired as retired:
        worker.close()
        if not worker.finished:
            raise SystemExit(0) from None
        log.info("worker.retired", reason=str(retired))
    except (Exception, SystemExit) as error:
        # Its links break when the process ends, so that nobody takes a crash for a broken link.
        _advise(error)
        worker.tell_crash(error)
        raise


def _advise(error: BaseException) -> None:
    if "default process group twice" in str(error):
        error.add_note(
            "TrainMover has initialised torch.distributed before train() was called: remove "
            "init_process_group, or guard it by `if not dist.is_initialized()`"
        )


def _tracer(about: Mapping[str, str]) -> Tracer:
    """Training does not fail for its traces."""
    try:
        return spans.tracer(about["worker"], "trainmover-worker", about, os.environ)
    except spans.Unusable as error:
        log.warning("trace.none", reason=str(error))
        return spans.SILENT


class _Worker:
    """The parts of a worker that outlive a run of `train`."""

    def __init__(
        self,
        env: WorkerEnvironment,
        rebindable: bool,
        role_class: RoleClassOf | None,
        tracer: Tracer,
    ) -> None:
        self._env, self._tracer = env, tracer
        self._rebindable, self._role_class = rebindable, role_class
        self._links = Links(env)
        self._control = Control(env, self._links, tracer)
        self.facts = self._control.facts
        self._seat = self._control.seat
        self._reporter = Reporter(env.agent, env.worker, env.beat_s)
        self._tapes = Tapes(env, self._control)
        self._standing = Standing(env, self._seat, self._tapes, role_class, self._too_slow)
        self._performance: Performance | None = None
        self.finished = False
        """Every rank, this one too, has done all its steps."""
        endpoint = self._links.endpoint
        endpoint.serve("state", self._serve_state)
        endpoint.serve("extras", self._serve_extras)
        self._reporter.start()
        self._control.start()
        on_sigterm(self._told_to_go, lambda: self._seat.position.phase is Phase.EMPTY)
        self._reporter.fact(
            WorkerRegistered(
                job=env.job,
                run=env.run,
                worker=env.worker,
                machine=env.machine,
                local_index=env.local_index,
                addresses=endpoint.addresses,
                labels=dict(label.split("=", 1) for label in filter(None, env.labels.split(","))),
            )
        )

    def work(self, train: Train) -> None:
        """Raises Retired at the end of the job, or what user code raises."""
        while True:
            role = self._next_role()
            self._seat.start(role)
            if role.generation == 0:
                self._standing.begin()
            performance = self._performance = Performance(
                self._env,
                role,
                self._seat,
                self._links,
                self._reporter,
                Binding(self._rebindable, self._role_class),
                tapes=self._tapes,
                tape=self._standing.tape(role),
                warmed=partial(self._standing.warmed, role),
            )
            try:
                train(Context(performance))
                self._finish(performance)
            except Rerun:
                log.info("train.again", rank=role.rank, generation=role.generation)
            except TapeMismatch as error:
                self._mismatched(role, str(error))
            except (aborts.StepAborted, Exception) as error:
                if performance.mismatch is not None:
                    self._mismatched(role, str(performance.mismatch))
                    continue
                # A cut set-up leaves zeros in collectives; what they lead to is no user error.
                in_setup = role.live and not performance.in_loop
                cut = isinstance(error, aborts.StepAborted) or in_setup
                if not (performance.generation_ended and cut):
                    raise
                log.info("train.cut", in_loop=performance.in_loop, error=str(error))
            finally:
                performance.close()
                self._standing.end()

    def _mismatched(self, role: Role, reason: str) -> None:
        """A standby is cold for this role class now; a joiner runs `train` again without tape."""
        self._standing.mismatched(role)
        log.warning("tape.mismatched", role_class=role.role_class, tape=role.tape, reason=reason)
        env = self._env
        self._reporter.fact(
            StandbyMismatched(
                job=env.job,
                run=env.run,
                worker=env.worker,
                rank=role.rank,
                role_class=role.role_class,
                tape=role.tape,
                reason=reason[:MAX_REASON],
            )
        )

    def _finish(self, performance: Performance) -> None:
        """EXIT: keep links and state until every rank has finished."""
        if not performance.finished:
            raise left_early()
        seat = self._seat
        self._reporter.fact(
            WorkerFinished(
                job=self._env.job,
                run=self._env.run,
                worker=self._env.worker,
                rank=performance.role.rank,
                generation=seat.position.generation,
                committed=seat.position.committed - performance.loop.closing,
                digest=performance.digest,
            )
        )
        while not seat.wait(lambda: seat.retired is not None, SAY_EVERY_S):
            log.info("worker.finished", waits_for="the other ranks")
        self.finished = True
        raise Retired(seat.retired)

    # ---- roles

    def _next_role(self) -> Role:
        """Blocks until a command says what this worker is. Raises Retired."""
        seat = self._seat
        while True:
            while not seat.wait(lambda: self._role_command() is not None, SAY_EVERY_S):
                log.info("worker.waits", for_what="a rank or a place among the standbys")
            with seat.cond:
                if seat.retired is not None:
                    raise Retired(seat.retired)
                command = self._role_command()
                if command == "unwound":
                    seat.reach(Stage.OBEYED, seat.orders.about)
                    seat.reach(Stage.RESTORED, seat.orders.about)
                    continue
            if isinstance(command, Switch):
                if role := self._live(command):
                    return role
            elif isinstance(command, Role):
                if command.generation == 0 and not self._standing.may_begin():
                    seat.wait(partial(self._wanted_else_than, command), TURN_S)
                    continue
                self._links.renew(command.placement)
                return command

    def _wanted_else_than(self, role: Role) -> bool:
        return self._role_command() != role

    def _role_command(self) -> Role | Switch | str | None:
        """Lock held."""
        seat, orders = self._seat, self._seat.orders
        if seat.retired is not None:
            return seat.retired
        if seat.refused:
            return None
        if orders.switch and orders.switch.setup and seat.stage < Stage.SWITCHED:
            return orders.switch
        decided = seat.decided
        if decided and decided.setup_again:
            return "unwound" if seat.stage < Stage.OBEYED else None
        if decided and seat.stage < Stage.OBEYED:
            return self._standing.joiner(decided)
        if seat.ahead.due:
            return self._standing.joiner(seat.ahead.due)
        if seat.stand_by is not None and orders.about == 0:
            return self._standing.role(seat.stand_by)
        return None

    def _live(self, command: Switch) -> Role | None:
        """Open the control links of a set-up that communicates; None when that failed."""
        rank = next(m.rank for m in command.members if m.worker == self._env.worker)
        self._links.renew(command.placement)
        try:
            self._links.switch(command, rank, SWITCH_S)
            self._links.open_data(command.generation)
        except Revoked as error:
            log.info("setup.cut", cause=str(error))
            return None
        except (TimeoutError, OSError, ValueError) as error:
            log.warning("setup.failed", error=str(error))
            self._seat.refuse(command.generation, f"switch: {error}")
            # Nobody asks about generation 1 once more: the same workers try in the next one.
            self._reporter.fact(
                StepAborted(
                    job=self._env.job,
                    run=self._env.run,
                    worker=self._env.worker,
                    rank=rank,
                    generation=command.generation,
                    step=0,
                    cause=f"the links of set-up were not opened: {error}"[:1000],
                )
            )
            return None
        self._seat.reach(Stage.SWITCHED, command.generation)
        return Role(
            rank=rank,
            layout=command.layout,
            generation=command.generation,
            members=command.members,
            placement=command.placement,
            live=True,
            role_class=self._standing.class_of(rank, command.layout),
        )

    # ---- what others take from here

    def _serve_extras(self, connection: Connection) -> None:
        performance = self._performance
        if performance is not None:
            serve_extras(self._seat, performance.tracked, connection)

    def _serve_state(self, connection: Connection) -> None:
        performance = self._performance
        if performance is not None:
            serve_state(self._seat, performance.tracked, connection)

    # ---- ends

    def _too_slow(self) -> None:
        """In a thread: the training thread may hang anywhere. The agent starts another worker."""
        role = self._seat.role
        name = role.role_class if role else ""
        log.error("standby.too_slow", role_class=name, limit_s=WARM_S)
        self.tell_crash(TimeoutError(f"expected to be warm for {name!r} within {WARM_S:g} s"))
        os._exit(1)

    def _told_to_go(self) -> None:
        self._control.soon(
            lambda: self._reporter.fact(
                InterruptionAnnounced(
                    job=self._env.job,
                    run=self._env.run,
                    interruption=f"preempt-{self._env.worker}",
                    kind="preemption",
                    workers=(self._env.worker,),
                    deadline=time.time() + self._env.grace_s,
                    reason="SIGTERM",
                )
            )
        )

    def tell_crash(self, error: BaseException) -> None:
        """Blocks until the agent has it, 2 s at most."""
        performance = self._performance
        position = self._seat.position
        role = performance.role if performance else None
        self._reporter.crash(
            Crash(
                worker=self._env.worker,
                error=UserError(
                    exception=type(error).__name__,
                    message=str(error)[:2000],
                    traceback="".join(traceback.format_exception(error))[-8000:],
                    rank=role.rank if role and role.generation else None,
                    step=position.committed,
                    committed=position.committed,
                ),
            )
        )
        self._reporter.flush(deadline_s=2)
        self._tracer.close(FLUSH_S)

    def close(self) -> None:
        self._reporter.flush(deadline_s=2)
        self._control.close()
        self._tracer.close(FLUSH_S)
        self._reporter.close()
        self._links.close()
