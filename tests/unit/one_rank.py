"""A worker in this process that runs `train` for real; the test is its agent and its mover."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from tests.unit.linked_ranks import WITHIN_S, assignment, environment, live, switch

from trainmover.runtime.binding import Binding
from trainmover.runtime.context import Context
from trainmover.runtime.links import Links
from trainmover.runtime.performance import Performance
from trainmover.runtime.reporting import Reporter
from trainmover.runtime.seat import Role, Seat
from trainmover.runtime.tape import Key, Tape
from trainmover.runtime.tapes import Tapes
from trainmover.schemas.base import Event
from trainmover.schemas.commands import Collect, Decided, Resume, Retire, Stage
from trainmover.schemas.environment import WorkerEnvironment
from trainmover.schemas.layout import Layout
from trainmover.schemas.local import Beat

Train = Callable[[Context], None]


class Said:
    """In the place of a Reporter: what the worker told its agent."""

    def __init__(self) -> None:
        self.facts: list[Event] = []
        self.beats: list[Beat] = []
        self.listen: Callable[[Event], None] = lambda event: None

    def fact(self, event: Event) -> None:
        self.facts.append(event)
        self.listen(event)

    def beat(self, beat: Callable[[], Beat], *, now: bool = False) -> None:
        self.beats.append(beat())

    def flush(self, deadline_s: float) -> bool:
        return True

    def of(self, kind: type[Event]) -> list[Any]:
        return [fact for fact in self.facts if isinstance(fact, kind)]


class Shelf:
    """In the place of Tapes: what was recorded."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def key(self, role_class: str) -> Key:
        return Key("layout", "script", role_class)

    def put(self, tape: Tape) -> str:
        self.tapes.append(tape)
        return f"{tape.key.role_class}@{len(self.tapes)}"


def perform(
    train: Train,
    env: WorkerEnvironment,
    role: Role,
    seat: Seat,
    links: Links,
    said: Said,
    *,
    rebindable: bool = False,
    tapes: Shelf | None = None,
    tape: Tape | None = None,
) -> Performance:
    """Runs `train` once, as `trainmover.run` does; raises what comes out of it."""
    seat.start(role)
    binding = Binding(rebindable)
    performance = Performance(
        env,
        role,
        seat,
        links,
        cast(Reporter, said),
        binding,
        tapes=cast(Tapes, tapes),
        tape=tape,
    )
    try:
        train(Context(performance))
    finally:
        performance.close()
    return performance


class OneRank:
    """The only rank of its job, in generation 1, or a standby for it. Close it."""

    def __init__(self, folder: Path, *, layout: str = "dp=1", faults: str = "") -> None:
        digests = folder / "digests"
        digests.mkdir()
        self.env = environment(folder, 0, 1).model_copy(
            update={"faults": faults, "step_digests": str(digests), "layout": layout}
        )
        self.said = Said()
        self.links = Links(self.env)
        self.seat = Seat(self.env.worker, lambda: None)
        self.members = assignment([self.links])
        self.generation = 1
        self.shelf = Shelf()
        self.performance: Performance | None = None

    def train(self, train: Train, *, rebindable: bool = False) -> Performance:
        self.links.renew(("m0",))
        command = switch(1, self.members).model_copy(
            update={"layout": Layout.parse(self.env.layout)}
        )
        self.seat.order(command)
        self.links.switch(command, 0, WITHIN_S)
        self.links.open_data(1)
        self.seat.reach(Stage.SWITCHED, 1)
        return self._perform(train, live(command, 0), rebindable)

    def stand_by(
        self, train: Train, *, rebindable: bool = False, tape: Tape | None = None
    ) -> Performance:
        self.links.renew(("m0",))
        layout = Layout.parse(self.env.layout)
        return self._perform(train, Role(0, layout, 0, placement=("m0",)), rebindable, tape)

    def _perform(
        self, train: Train, role: Role, rebindable: bool, tape: Tape | None = None
    ) -> Performance:
        return perform(
            train,
            self.env,
            role,
            self.seat,
            self.links,
            self.said,
            rebindable=rebindable,
            tapes=self.shelf,
            tape=tape,
        )

    def digests(self) -> list[str]:
        """A line per committed step."""
        path = Path(self.env.step_digests) / "rank0.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    # ---- as a broken link, and as the mover

    def break_links(self) -> None:
        self.links.data_fence.revoke(self.generation, "a link broke")

    def recover(self) -> None:
        """Files all orders of the next generation: the same assignment goes on where it is."""
        self.decide(self.seat.position.committed)
        self.seat.order(switch(self.generation, self.members, self.target))
        self.seat.order(Resume(generation=self.generation, target=self.target))

    def decide(self, target: int, *, setup_again: bool = False) -> None:
        self.generation += 1
        self.target = target
        self.seat.collect(Collect(generation=self.generation, assignment="x"), self.links.end)
        self.seat.order(decided(self.generation, switch(1, self.members), target, setup_again))

    def retire(self) -> None:
        self.seat.retire(Retire(reason="test"))

    def close(self) -> None:
        self.retire()
        for thread in threading.enumerate():
            if thread.name == "tm-caretaker":
                thread.join(WITHIN_S)
        self.links.close()
        self.links.data_fence.close()
        self.links.control_fence.close()


def decided(generation: int, like: Any, target: int, setup_again: bool = False) -> Decided:
    return Decided(
        generation=generation,
        layout=like.layout,
        members=like.members,
        placement=like.placement,
        target=target,
        setup_again=setup_again,
    )
