"""What a worker stands by for, and with whose recorded answers it sets up for a rank."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import structlog

from trainmover.runtime.recovery import joiner_role
from trainmover.runtime.seat import Role, Seat
from trainmover.runtime.tape import Tape, TapeUnusable
from trainmover.runtime.tapes import Tapes
from trainmover.runtime.warming import Turn, WarmUp
from trainmover.schemas.commands import Decided, Prepare, StandBy
from trainmover.schemas.environment import WorkerEnvironment
from trainmover.schemas.layout import Layout
from trainmover.schemas.roles import RoleClass, RoleClassOf, classes, role_class_of

log = structlog.get_logger()


class Standing:
    """Outlives the runs of `train`; used by the training thread."""

    def __init__(
        self,
        env: WorkerEnvironment,
        seat: Seat,
        tapes: Tapes,
        role_class: RoleClassOf | None,
        late: Callable[[], None],
    ) -> None:
        """`late` is called in another thread when a warm-up takes too long."""
        self._env, self._seat, self._tapes = env, seat, tapes
        self._role_class, self._late = role_class, late
        self._turn = Turn(Path(env.directory))
        self._warm_up: WarmUp | None = None
        self._tried: set[tuple[str, str]] = set()
        """Role classes that were warmed up for or cannot be, with the tape for each."""
        self._mismatched: set[str] = set()
        """Tapes that do not fit what `train` does here: their groups echo."""

    # ---- roles

    def role(self, told: StandBy) -> Role | None:
        """For the role class that is next; None when there is none. Raises ValueError."""
        for each in self._classes:
            tape = told.tapes.get(each.name, "")
            if (each.name, tape) not in self._tried:
                return Role(
                    rank=each.representative,
                    layout=told.layout,
                    generation=0,
                    placement=(self._env.machine,) * told.layout.world_size,
                    role_class=each.name,
                    tape=tape,
                )
        return None

    def joiner(self, command: Decided | Prepare) -> Role:
        """For the rank that a decision or a plan gives to this worker. Raises ValueError."""
        role = joiner_role(command, self._env.worker)
        name = self.class_of(role.rank, role.layout)
        return replace(role, role_class=name, tape=command.tapes.get(name, ""))

    def class_of(self, rank: int, layout: Layout) -> str:
        """Raises ValueError where the script's function gives no name."""
        return role_class_of(rank, layout, self._role_class)

    @cached_property
    def _classes(self) -> tuple[RoleClass, ...]:
        return classes(Layout.parse(self._env.layout), self._role_class)

    # ---- what they set up with

    def tape(self, role: Role) -> Tape | None:
        """Blocks as `Tapes.get`. None where groups have to echo."""
        if not role.tape or role.tape in self._mismatched:
            return None
        try:
            return self._tapes.get(role.tape, role.role_class)
        except TapeUnusable as error:
            log.warning("tape.unusable", role_class=role.role_class, reason=str(error))
            return None

    # ---- a standby's warm-up

    def may_begin(self) -> bool:
        """Whether it is this worker's turn on its machine. Does not block."""
        return self._turn.take()

    def begin(self) -> None:
        """Until `end` at a low priority. Its turn must have come."""
        self._warm_up = WarmUp(self._turn, self._seat, self._late)

    def end(self) -> None:
        """Of whatever warm-up is under way."""
        warm_up, self._warm_up = self._warm_up, None
        if warm_up is not None:
            warm_up.end()

    def warmed(self, role: Role) -> bool:
        """It is over. Whether the worker stays in this role class."""
        self.end()
        self._tried.add((role.role_class, role.tape))
        with self._seat.cond:
            told = self._seat.stand_by
            return self._seat.called or told is None or self.role(told) is None

    def mismatched(self, role: Role) -> None:
        """The tape is of no use here; a standby stays cold for its role class."""
        self._mismatched.add(role.tape)
        self._tried.add((role.role_class, role.tape))
