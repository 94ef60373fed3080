"""One run of `train` for one role: everything that is made anew when it runs again.

Holds the pieces together (tracked state, groups, vote, recovery) and has the loop that
`ctx.steps` is; the decisions are in the modules it calls.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import structlog
import torch
import torch.distributed as dist

from trainmover.runtime import dtensors, rng
from trainmover.runtime.admission import Admission, Issued, Mode
from trainmover.runtime.backend import init_torch_distributed, shutdown_torch_distributed
from trainmover.runtime.binding import Binding
from trainmover.runtime.block import Block
from trainmover.runtime.commit import Phase
from trainmover.runtime.compiled import keep_out_of_graphs
from trainmover.runtime.engine import Wiring
from trainmover.runtime.faults import Faults
from trainmover.runtime.gate import Gate
from trainmover.runtime.link import LinkBroken
from trainmover.runtime.links import Links
from trainmover.runtime.loop import Loop
from trainmover.runtime.news import News
from trainmover.runtime.points import arm_points
from trainmover.runtime.recovery import Recovery, Rerun, Retired
from trainmover.runtime.reporting import Reporter
from trainmover.runtime.seat import Role, Seat
from trainmover.runtime.shadow import Shadow
from trainmover.runtime.step import Step, give
from trainmover.runtime.steplog import StepLog
from trainmover.runtime.tape import Tape, TapeMismatch
from trainmover.runtime.tapes import Tapes
from trainmover.runtime.tracked import Tracked
from trainmover.runtime.vote import Vote
from trainmover.schemas.environment import WorkerEnvironment
from trainmover.schemas.events import RankReady, StandbyWarmed
from trainmover.schemas.fault import Fault

log = structlog.get_logger()

COLLECTIVE_S = 1800.0
"""As torch's default for gloo: a rank may load or evaluate that long while others wait."""
TAIL_STEPS = 3
"""In so many steps a collective after the optimizer is looked for."""


class Performance:
    """`seat`, `links` and `reporter` outlive it. Used by the training thread alone, except for
    the callbacks of groups."""

    def __init__(
        self,
        env: WorkerEnvironment,
        role: Role,
        seat: Seat,
        links: Links,
        reporter: Reporter,
        binding: Binding,
        *,
        tapes: Tapes | None = None,
        tape: Tape | None = None,
        warmed: Callable[[], bool] = lambda: True,
    ) -> None:
        """`tapes` takes what a representative records in a live set-up; elsewhere `tape` answers
        for the other ranks, None: groups echo. `warmed` ends a standby's warm-up; whether it stays
        in this role class."""
        self.env, self.role, self.seat, self.links, self.reporter = env, role, seat, links, reporter
        self.binding, self._warmed = binding, warmed
        self.local_rank, self.device = env.local_index, torch.device("cpu")
        self.news = News(env, seat, reporter)
        self.axis_groups: dict[str, dist.ProcessGroup] = {}
        self.started = time.monotonic()
        self.tracked = Tracked()
        self.loop = Loop()
        self.tracked.add(trainmover_loop=self.loop)
        self.admission = Admission(mode=Mode.SETUP if role.live else Mode.ECHO)
        self.gate = Gate()
        self.vote = Vote(seat, links.control, links.control_fence, role.rank, role.placement)
        self.recovery = Recovery(seat, links, self.tracked, self.vote, self.loop, self._rebind)
        self.faults = Faults(env.faults, env.worker, self._announce, links.cut_one)
        self.steplog = StepLog(env.step_digests, role.rank, env.worker)
        self.joined_at: int | None = None
        self.reported: dict[str, float] = {}
        self.averages: dict[str, float] = {}
        self.replica_digests: dict[str, str] = {}
        self._compare_replicas = True
        """After the first commit, the first one of each later generation, and the last but one:
        what a script forgot to track, or declared wrongly, shows as a difference."""
        self._compare_next = False
        """That commit was the last one: a commit that ends a downtime does not wait for hashes."""
        self.stop_wanted = False
        self.let_update = False
        self.before_update: Callable[[], None] | None = None
        self.poisoned = 0
        self.in_loop = self.finished = False
        self.shadowing = role.generation == 0
        """A standby, or a shadow step: what runs now leaves nothing behind."""
        self.digest = ""
        self.after_hooks: list[tuple[Step, Callable[[], None]]] = []
        self._last_commit = self.started
        self._last_s = 0.0
        self.phase = ""
        """What was said last of what this rank does."""
        self._armed_step = 0
        self._bound = "set-up" if role.live else "again"
        self._setup_s = 0.0
        self._wiring = Wiring(
            mesh=links.data,
            fence=links.data_fence,
            admission=self.admission,
            on_poisoned=self._count_poisoned,
            on_broken=self.link_broken,
            timeout_s=COLLECTIVE_S,
        )
        self._set_variables()
        rng.seed_rank(role.rank)
        self.shadow = Shadow(self, tapes, tape)
        hook = self.shadow.hook
        self.factory = init_torch_distributed(
            self._wiring, role.rank, role.layout.world_size, hook.attach if hook else None
        )

    def _set_variables(self) -> None:
        """torchrun's variables keep their meaning."""
        os.environ.update(
            RANK=str(self.role.rank),
            WORLD_SIZE=str(self.role.layout.world_size),
            LOCAL_RANK=str(self.env.local_index),
        )

    def _rebind(self, role: Role) -> bool:
        """Go on with the parked call as another rank; False: `train` has to run again."""
        started = time.monotonic()
        layout, groups = role.layout, self.factory.groups
        world = tuple(range(layout.world_size))
        axes = {group: axis for axis, group in self.axis_groups.items()}
        known = all(g.engine.ranks == world or g in axes for g in groups)
        serves = self.binding.can_go_on(layout, self.role.rank, role.rank)
        bound = self.tracked.dtensors  # their mesh has the coordinates of the rank it was made for
        if not (serves and self.in_loop and known and not bound):
            return False
        self.role = self.seat.role = replace(role, role_class=self.role.role_class)
        self._set_variables()
        self.links.renew(role.placement)
        self._wiring.mesh = self.links.data
        ranks_of = {
            g: world if g.engine.ranks == world else layout.peers(role.rank, axes[g])
            for g in groups
        }
        self.factory.rebind(role.rank, ranks_of)
        self.vote.rebind(self.links.control, role.rank, role.placement)
        with self.binding.asking():
            self.tracked.rebuild_batches()
        self.shadowing = False
        self.binding.assigned()
        self.steplog = StepLog(self.env.step_digests, role.rank, self.env.worker)
        self._bound, self._setup_s = "rebound", time.monotonic() - started
        return True

    def close(self) -> None:
        self.gate.close()
        shutdown_torch_distributed(self.factory, deadline_s=5)
        dtensors.forget_groups()

    # ---- the loop

    def steps(self, total: int, closing: bool) -> Iterator[Step]:
        """Shadow steps, then every step until it is committed. See Context.steps."""
        self.loop.begin(min(total, self.env.max_steps or total), closing)
        self.in_loop = True
        self.seat.loop = self.loop
        self.gate.running = True
        self.gate.watch(self.tracked.optimizers)
        keep_out_of_graphs()
        self.tracked.check()
        self.admission.mode = Mode.CLOSED
        if self.role.generation:
            self.binding.assigned()
        self.binding.open, self.shadowing = False, True
        yield from self.shadow.steps()
        self._take_part()
        self.shadowing = False
        while True:
            if self.seat.position.phase is Phase.FROZEN:
                self.beat("frozen")
                self.recovery.stand_frozen()
            if self.seat.position.ended:
                self.beat("parked")
                self.recovery.park()
                self._compare_replicas = True
            if self.seat.retired is not None:  # the job is over before its steps are
                raise Retired(self.seat.retired)
            number = self.seat.position.committed
            if number >= self.loop.blocks:
                break
            step = Block(self, number, closing=number >= self.loop.total, shadow=False)
            yield from give(step)
            if step.committed:
                self.hit("between")
        self._end_of_loop()

    def _take_part(self) -> None:
        """Parks a standby or a joiner; a rank of a live set-up puts its extras at its buddies."""
        seat = self.seat
        with seat.cond:
            seat.set_up = True
            seat.notify()
        self._setup_s = time.monotonic() - self.started
        if self.role.live:
            self.shadow.store()
            self._first_extras()
        elif self.role.generation == 0:
            self._say_warm()
            self.beat("standby")
            self.recovery.park()
        else:
            self.beat("parked")
            self.recovery.park()
        if not self.role.live:
            self.joined_at = seat.position.committed
        shards = {name: self._shard(name) for name in self.tracked.sharded_over}
        self.news.say(
            RankReady,
            rank=self.role.rank,
            generation=seat.position.generation,
            shards=shards,
            setup_s=self._setup_s,
            bound=self._bound,
            role_class=self.role.role_class,
            tape=self.shadow.tape_name,
        )

    def _say_warm(self) -> None:
        """Raises Rerun where another role class is next."""
        role, resident = self.role, self._warmed()
        self.news.say(
            StandbyWarmed,
            rank=role.rank,
            warm_s=self._setup_s,
            role_class=role.role_class,
            steps=self.shadow.count,
            tape=role.tape,
            replayed=self.shadow.replays,
            resident=resident,
        )
        if not resident:
            raise Rerun

    def _first_extras(self) -> None:
        try:
            self.vote.rebuddy(0, self.tracked.own(), deadline_s=None)
        except LinkBroken as error:
            self.link_broken(error.peer_rank, error.peer_worker, error.channel, str(error))
            self.beat("parked")
            self.recovery.park()
        except Exception as error:
            log.info("setup.cut", cause=str(error))
            self.recovery.park()

    def _shard(self, name: str) -> str:
        over = self.tracked.sharded_over[name]
        own = {axis: str(self.role.layout.coordinate(self.role.rank, axis)) for axis in over}
        return ",".join(f"{axis}={at}" for axis, at in own.items()) or self.role.layout.shard(
            self.role.rank
        )

    def _end_of_loop(self) -> None:
        """EXIT: state and links stay while user code runs on; a thread answers plans meanwhile."""
        self.finished = self.admission.finished = True
        self.gate.running = False
        self.digest = self.tracked.state_digest()
        self.arm(self.loop.blocks)
        threading.Thread(target=self._care, name="tm-caretaker", daemon=True).start()
        self.beat("done")
        self.hit("end")

    def _care(self) -> None:
        with suppress(Retired, Rerun):
            while True:
                self.seat.wait(lambda: self.seat.position.ended or self.seat.retired is not None)
                self.recovery.park()

    @property
    def mismatch(self) -> TapeMismatch | None:
        """What made `tape` useless, whatever error it became on its way out of `train`."""
        return self.shadow.mismatch

    # ---- what a block calls

    def settle(self) -> None:
        """Blocks until every collective that was issued has ended."""
        for group in self.factory.groups:
            group.engine.settle()

    @property
    def generation(self) -> int:
        return self.seat.position.generation

    @property
    def generation_ended(self) -> bool:
        return self.links.data_fence.revoked or self.seat.position.ended

    def committed(self, step: Step, *, poisoned: bool, numbers: dict[str, float]) -> None:
        now = time.monotonic()
        self._last_s, self._last_commit = now - self._last_commit, now
        position = self.seat.position
        if not poisoned:
            self.steplog.write(step.number, position.generation, self.tracked, numbers)
        hooks, self.after_hooks = self.after_hooks, []
        for owner, hook in hooks:
            if owner is step:
                hook()
        if self._compare_replicas or position.committed == self.loop.blocks - 1:
            self._compare_replicas, self._compare_next = False, True
        self._warn_of_the_tail()
        self.beat("step")
        if poisoned:
            self.news.aborted(step.number + 1, "a collective after the vote was cut off")

    def compare_replicas(self) -> None:
        """As a block opens: what ranks hold after the last commit, for its vote."""
        if self._compare_next:
            self._compare_next = False
            self.replica_digests = {
                f"{name}/{self._shard(name)}": digest
                for name, digest in self.tracked.object_digests().items()
            }

    def watch_the_tail(self) -> None:
        """From the vote's result to the end of the block, in the first steps."""
        if self.seat.position.committed < TAIL_STEPS:
            self.admission.trace = []

    def _warn_of_the_tail(self) -> None:
        tail, self.admission.trace = self.admission.trace, None
        if tail:
            self.news.collective_in_the_tail(tail[0])

    def send_late_extras(self, step: int) -> None:
        """Rule 8. Cut off, the block opens all the same and is undone at its gate."""
        try:
            late = self.vote.late_extras(step, self.tracked.own_at_opening())
        except LinkBroken as error:
            self.link_broken(error.peer_rank, error.peer_worker, error.channel, str(error))
            return
        except Exception as error:
            log.info("late_extras.cut", cause=str(error))
            return
        self.news.late_extras(late)

    def arm(self, step: int) -> None:
        if self.faults.any:
            self._armed_step = step
            self.faults.arm(self.role.rank, step, self.joined_at)
            self.before_update = arm_points(self.faults, self.tracked)

    def hit(self, point: str) -> None:
        if self.faults.any:
            self.faults.hit(point)

    # ---- what groups call

    def _count_poisoned(self, issued: Issued) -> None:
        self.poisoned += 1

    def link_broken(self, rank: int, worker: str, channel: str, cause: str) -> None:
        """An EOF poisons the generation whose link it is; the control links go on voting."""
        generation = self.links.data_fence.generation
        self.news.lost(worker, generation, channel, cause)
        self.links.data_fence.revoke(generation, f"rank {rank} ({worker}) was lost: {cause}")
        if channel == "control":
            self.links.control_fence.revoke(generation, cause)

    # ---- what others hear

    def beat(self, phase: str) -> None:
        self.phase = phase
        self.news.beat(phase, self._last_s, self.averages)

    def _announce(self, fault: Fault) -> None:
        self.news.injected(fault, self._armed_step)
