"""What the threads of a worker share: its position, its orders, and how far it obeyed them.

The control thread brings commands, the training thread (or the caretaker after the loop) does
the work at a boundary; both change this object under its one lock and wake each other.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from trainmover.runtime import commit
from trainmover.runtime.ahead import Ahead
from trainmover.runtime.attempt import Attempt
from trainmover.runtime.commit import Phase, Position
from trainmover.runtime.extras import Parts, Shelf
from trainmover.runtime.loop import Loop
from trainmover.runtime.pace import Pace
from trainmover.runtime.transfer.pulled import NOTHING, Pulled
from trainmover.schemas.commands import (
    Answer,
    Collect,
    Decided,
    Drop,
    Freeze,
    Mark,
    Prepare,
    Pull,
    Resume,
    Retire,
    Stage,
    StandBy,
    Switch,
)
from trainmover.schemas.layout import Layout
from trainmover.schemas.member import Member

MARKS: dict[Stage, Mark] = {
    Stage.OBEYED: "obeyed",
    Stage.RESTORED: "restored",
    Stage.SWITCHED: "switched",
    Stage.RESUMED: "resumed",
}


@dataclass(frozen=True, slots=True)
class Role:
    """For which rank `train` runs, and whether its set-up communicates (`members`) or echoes."""

    rank: int
    layout: Layout
    generation: int
    """The set-up's generation; 0: a standby, whose rank is only stood in for."""
    members: tuple[Member, ...] = ()
    placement: tuple[str, ...] = ()
    live: bool = False
    """Set-up of a generation in which nobody has state yet: collectives run for real."""
    role_class: str = ""
    tape: str = ""
    """Name of what answers for the other ranks; empty: groups echo."""


@dataclass(slots=True)
class Orders:
    """The latest commands for generation `about`."""

    about: int = 0
    decided: Decided | None = None
    pull: Pull | None = None
    switch: Switch | None = None
    resume: Resume | None = None


class Seat:
    """`cond` guards everything; `changed` is called (lock held) whenever an answer would differ."""

    def __init__(self, worker: str, changed: Callable[[], None]) -> None:
        self._lock = threading.RLock()
        self.cond = threading.Condition(self._lock)
        self._waiting = 0
        self.worker = worker
        self.position = Position()
        self.shelf = Shelf()
        self.stage = Stage.NONE
        self.orders = Orders()
        self.ahead = Ahead()
        self.stand_by: StandBy | None = None
        self.retired: str | None = None
        self.role: Role | None = None
        self.set_up = False
        """Set-up and shadow steps of `role` are done."""
        self.loop: Loop | None = None
        self.assignment = ""
        self.pulled: Pulled | None = None
        self.links = (0, 0, 0)
        self.incident = ""
        """Name of the interruption that the orders are about; empty once its first step is done."""
        self.reached: dict[Mark, float] = {}
        """What of it was reached when, seconds since 1970."""
        self._frozen_s = 0.0
        self._pace = Pace()
        self.refused = ""
        self.over: Callable[[Attempt], None] = lambda attempt: None
        """Told, lock held, what this worker went through when that ends: by the first step, or cut
        short by a newer plan or the end of the job."""
        self._changed = changed

    # ---- the training side

    def notify(self) -> None:
        """Lock held."""
        if self._waiting:
            self.cond.notify_all()
        self._changed()

    def move(self, step: Callable[[Position], Position]) -> Position:
        """Apply a pure decision to the position and wake whoever waits for it."""
        with self._lock:  # with the condition it costs two calls more, four times a step
            before = self.position
            self.position = after = step(before)
            if after.committed > before.committed:
                self._pace.committed()
                if after.phase is Phase.FROZEN:
                    self._frozen_s = time.time()
            if self.orders.resume is not None:
                self._mark_first_step()
            if self._waiting:  # `notify`, and cheaper than to call it
                self.cond.notify_all()
            self._changed()
            return after

    def _mark_first_step(self) -> None:
        resume, p = self.orders.resume, self.position
        if resume is None or "first_step" in self.reached or p.generation != resume.generation:
            return
        if p.known_committed > resume.target or p.phase is Phase.DONE:
            self.reached["first_step"] = time.time()
            self._attempt_over()

    def _attempt_over(self, error: str = "") -> None:
        if not self.incident:
            return
        pulled = self.pulled or NOTHING
        attempt = Attempt(
            incident=self.incident,
            generation=self.orders.about,
            worker=self.worker,
            rank=self._rank,
            reached=dict(self.reached),
            donor=next(iter(pulled.donors), ""),
            num_bytes=pulled.bytes,
            links=self.links,
            error=error,
            gives=self._gives,
        )
        self.incident = ""
        self.over(attempt)

    @property
    def _gives(self) -> bool:
        """It knows that another worker takes its rank."""
        decided = self.orders.decided
        return decided is not None and all(m.worker != self.worker for m in decided.members)

    @property
    def _rank(self) -> int | None:
        """None: a standby that has not heard which rank it takes; prepared for one it has none."""
        held = self.position.phase is not Phase.EMPTY or self.orders.decided is not None
        if self.role is not None and self.role.generation and held:
            return self.role.rank
        members = self.orders.decided.members if self.orders.decided else ()
        return next((m.rank for m in members if m.worker == self.worker), None)

    def keep(self, generation: int, rank: int, version: int, parts: Parts, *, full: bool) -> None:
        """Put a neighbour's extras on the shelf if the protocol still counts them (CUT)."""
        with self._lock:
            before = self.position
            self.position = commit.keep(before, generation, rank, version)
            if self.position is not before:
                self.shelf.put(rank, version, parts, full=full)
                self.shelf.prune(self.position.kept)
                self.notify()

    def reach(self, stage: Stage, generation: int) -> None:
        """The work for a stage of `generation` is done; ignored when another was promised since."""
        with self.cond:
            if self.orders.about == generation and stage > self.stage:
                now = time.time()
                self.reached |= {MARKS[s]: now for s in MARKS if self.stage < s <= stage}
                self.stage = stage
                self._mark_first_step()
                self.notify()

    def refuse(self, generation: int, reason: str) -> None:
        with self.cond:
            if self.orders.about == generation:
                self.refused = reason
                self.notify()

    def start(self, role: Role) -> None:
        """`train` is about to run for `role`. A live set-up starts from nothing."""
        with self.cond:
            self.role, self.set_up, self.loop = role, False, None
            if role.live:
                self.shelf.clear()
                self.position = Position(
                    generation=role.generation,
                    phase=Phase.COMPUTING,
                    promised=role.generation,
                )
            self.notify()

    def freeze(self) -> int:
        """Planned generation for which this rank's next vote asks to freeze; 0: none."""
        if not self.ahead.freeze:
            return 0
        with self._lock:
            self.position = commit.freeze(self.position, self.ahead.freeze)
            return self.position.freeze

    # ---- the control side

    def plan(self, command: Prepare | Freeze) -> None:
        """Of a planned switch; nothing is done for one that was dropped, or decided by now."""
        with self.cond:
            if command.generation > max(self.position.thawed, self.position.promised):
                self.ahead.told(command)
                self.notify()

    def ready_ahead(self, generation: int) -> None:
        """The joiner of a planned switch is prepared."""
        with self.cond:
            self.ahead.ready(generation)
            self.notify()

    def cannot_prepare(self, generation: int, error: str) -> None:
        """It cannot be; the mover drops the plan."""
        with self.cond:
            self.ahead.failed(generation, error)
            self.notify()

    def drop(self, command: Drop) -> None:
        """The planned switch comes to nothing; who is frozen for it goes on."""
        with self.cond:
            self.position = commit.thaw(self.position, command.generation)
            self.ahead.drop(command.generation)
            self.notify()

    def collect(self, command: Collect, end: Callable[[int], None]) -> Answer:
        """CUT, PROMISE: `end` stops the running generation on every link before the answer."""
        with self.cond:
            after = commit.collect(self.position, command.generation)
            if after is None:
                return self.answer(refused="a higher generation was promised")
            known = self.assignment
            if self.position.promised == command.generation and known != command.assignment:
                return self.answer(
                    refused=f"generation {command.generation} was asked with assignment {known}"
                )
            self.position, self.assignment = after, command.assignment
            if self.orders.about != command.generation:
                self._attempt_over(f"superseded by generation {command.generation}")
                self.orders = Orders(about=command.generation)
                self.stage, self.refused, self.pulled = Stage.COLLECTED, "", None
                self.incident, self.reached = command.incident, {"collected": time.time()}
                if after.phase is Phase.FROZEN:
                    self.reached = {"frozen": self._frozen_s, **self.reached}
                self._pace.interrupted()
                self.notify()
        # Outside the lock: the fence waits for copies under way, their thread may want the lock.
        end(command.generation)
        return self.answer()

    def order(self, command: Decided | Pull | Switch | Resume) -> bool:
        """File a command of the promised generation; False when it is about another one."""
        with self.cond:
            first = isinstance(command, Switch) and command.generation == 1
            if first and self.orders.about == 0:
                self.orders = Orders(about=1)
            if self.orders.about != command.generation:
                return False
            match command:
                case Decided():
                    self.orders.decided = command
                case Pull():
                    self.orders.pull = command
                case Switch():
                    self.orders.switch = command
                case Resume():
                    self.orders.resume = command
            self.notify()
            return True

    @property
    def decided(self) -> Decided | None:
        """The decision that still has to be obeyed. Lock held.

        The one for the generation that runs by now is over: it says nothing about the open step.
        """
        decided, p = self.orders.decided, self.position
        if decided is None or not decided.generation == p.promised > p.generation:
            return None
        return decided

    @property
    def called(self) -> bool:
        """A standby is wanted elsewhere: in a rank, or nowhere any more. Lock held."""
        return bool(self.orders.about or self.ahead.due or self.retired is not None)

    @property
    def outdated(self) -> bool:
        """It stands by with another tape than it was told last. Lock held."""
        role, told = self.role, self.stand_by
        if role is None or role.generation or told is None:
            return False
        return told.tapes.get(role.role_class, "") != role.tape

    def told_to_stand_by(self, command: StandBy) -> None:
        with self.cond:
            self.stand_by = command
            self.notify()

    def retire(self, command: Retire) -> None:
        with self.cond:
            self.retired = command.reason
            self._attempt_over("" if self._gives else command.reason)
            self.notify()

    def answer(self, refused: str = "") -> Answer:
        with self.cond:
            p = self.position
            pulled = self.pulled or NOTHING
            running = p.generation if not p.ended else 0
            return Answer(
                worker=self.worker,
                about=self.orders.about,
                stage=self.stage,
                assignment=self.assignment,
                running=running,
                promised=p.promised,
                rank=self.role.rank if self.role else None,
                empty=p.phase is Phase.EMPTY,
                set_up=self.set_up,
                committed=p.known_committed,
                holding=p.phase is Phase.HOLDING,
                dirty=p.dirty,
                prepared=self.ahead.prepared,
                prepare_error=self.ahead.error,
                frozen=p.freeze if p.phase is Phase.FROZEN else 0,
                dropped=p.thawed,
                done=p.phase is Phase.DONE,
                total=self.loop.total if self.loop else None,
                extras=dict(p.kept),
                donor=next(iter(pulled.donors), None),
                donors=dict(pulled.donors),
                donor_digest=pulled.donor_digest,
                digest=pulled.digest,
                num_bytes=pulled.bytes,
                pull_s=pulled.seconds,
                links=self.links,
                reached=dict(self.reached),
                normal_step_s=self._pace.normal_step_s,
                refused=refused or self.refused,
            )

    # ---- used by both

    def wait(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        with self.cond:
            self._waiting += 1
            try:
                return self.cond.wait_for(condition, timeout_s)
            finally:
                self._waiting -= 1

    def forget_dirt(self, generation: int, target: int) -> bool:
        """The donor's state is in place; False when a newer generation was promised since."""
        with self.cond:
            after = commit.restored(self.position, generation, target)
            if after is None:
                return False
            self.position = after
            self.notify()
            return True
