"""The same script without a job: `python train.py` is one rank, `torchrun train.py` plain groups.

Everything that a step does happens here as in a job, in the same order and from the same seeds, so
that the bits are the same; only nothing is undone, and nobody takes over.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer

from trainmover.runtime import codec, rng
from trainmover.runtime.admission import Admission, Mode
from trainmover.runtime.averages import Averages
from trainmover.runtime.binding import Binding
from trainmover.runtime.compiled import keep_out_of_graphs
from trainmover.runtime.context import Context
from trainmover.runtime.gate import Gate
from trainmover.runtime.loop import Loop, left_early
from trainmover.runtime.plain_groups import Groups, Launched, OneRank
from trainmover.runtime.seat import Role
from trainmover.runtime.step import Step, give
from trainmover.runtime.telling import Telling, in_words
from trainmover.runtime.tracked import Tracked
from trainmover.schemas.digest import of_job
from trainmover.schemas.layout import Layout
from trainmover.schemas.roles import RoleClassOf, role_class_of

LAYOUT = "TRAINMOVER_LAYOUT"
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
"""What torchrun sets, and any other launcher of env:// groups."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank this process is, from its environment; `launched`: it has peers to meet."""

    rank: int
    local_rank: int
    layout: Layout
    launched: bool

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Self:
        """Raises ValueError for a layout that does not fit the number of ranks."""
        launched = all(environ.get(name) for name in LAUNCHED)
        size = int(environ["WORLD_SIZE"]) if launched else 1
        layout = Layout.parse(environ.get(LAYOUT) or f"dp={size}")
        if layout.world_size != size:
            raise ValueError(
                f"expected {layout.world_size} ranks for {LAYOUT}={layout}, got {size}: start it "
                f"with torchrun --nproc-per-node {layout.world_size}, or change the layout"
            )
        if not launched:
            return cls(0, 0, layout, launched=False)
        rank = int(environ["RANK"])
        return cls(rank, int(environ.get("LOCAL_RANK") or rank), layout, launched=True)

    def in_words(self, script: str) -> str:
        size = self.layout.world_size
        who = f"{size} plain rank{'s' * (size > 1)}" if self.launched else "one rank alone"
        # a rank without a replica has nobody to take its state from
        protected = f"trainmover run --nproc-per-node {max(size, 2)} --standbys 1 {script}"
        return f"{who}, unprotected: a death ends the training. Protected: {protected}"


def perform(
    train: Callable[[Context], None], *, rebindable: bool, role_class: RoleClassOf | None = None
) -> None:
    """Runs `train` once; raises what it raises. Collective under torchrun."""
    performance = Unprotected(Place.read(os.environ), Binding(rebindable, role_class))
    try:
        train(Context(performance))
        if not performance.finished:
            raise left_early()
        performance.say_end()
    finally:
        performance.close()


class Unprotected:
    """One run of `train`, as `Performance` is in a job."""

    generation = 1
    shadowing = False

    def __init__(self, place: Place, binding: Binding) -> None:
        role_class = role_class_of(place.rank, place.layout, binding.role_class)
        self.role = Role(place.rank, place.layout, 1, live=True, role_class=role_class)
        self.binding, self.local_rank = binding, place.local_rank
        self.axis_groups: dict[str, dist.ProcessGroup] = {}
        self.after_hooks: list[tuple[Step, Callable[[], None]]] = []
        self.loop = Loop()
        self.tracked = Tracked()
        self.tracked.add(trainmover_loop=self.loop)
        self.admission = Admission(Mode.ECHO)
        self.reported: dict[str, float] = {}
        self.averages: dict[str, float] = {}
        self.stop_wanted = self.finished = False
        self.digest = ""
        """Of the state of all ranks at the end of the loop, as the job's."""
        self.telling = Telling(silent=place.rank > 0)
        self.telling.say(place.in_words(sys.argv[0]))
        if not place.launched:
            os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        self._groups: Groups
        self._groups = Launched(self.local_rank) if place.launched else OneRank(self.admission)
        self.gate = Gate()
        self._agreeing = Averages(self._groups.agreeing)
        rng.seed_rank(place.rank)

    @property
    def device(self) -> torch.device:
        return self._groups.device

    def steps(self, total: int, closing: bool) -> Iterator[Step]:
        """Every step once. See Context.steps."""
        self.loop.begin(total, closing)
        self.gate.running = True
        self.gate.watch(self.tracked.optimizers)
        keep_out_of_graphs()
        self.tracked.check()
        self.admission.mode = Mode.CLOSED
        self.binding.assigned()
        self.binding.open = False
        number = 0
        while number < self.loop.blocks:
            block = PlainBlock(self, number, closing=number >= self.loop.total)
            yield from give(block)
            number += block.committed
        self.finished = self.admission.finished = True
        self.gate.running = False
        self.digest = self._digest()

    def beat(self, phase: str) -> None:
        """Nobody listens."""

    def agree(self) -> bool:
        """Whether the loop ends with this step; blocks until all ranks have come here."""
        codec.encode(self.tracked.vars, "vars")  # raises for what could not move with a rank
        stopping, averages = self._agreeing.agree(self.stop_wanted, self.reported)
        self.averages = averages or self.averages
        self.reported.clear()
        return stopping

    def committed(self, block: "PlainBlock") -> None:
        if block.stopping:
            self.loop.end_at(block.number + 1)
        hooks, self.after_hooks = self.after_hooks, []
        for owner, hook in hooks:
            if owner is block:
                hook()
        if not block.closing:
            self.telling.committed(block.number + 1, self.averages)

    def say_end(self) -> None:
        if self.averages:
            self.telling.say(f"step {self.loop.total}{in_words(self.averages)}")
        self.telling.say(f"completed: {self.loop.total} steps, state {self.digest}")

    def _digest(self) -> str:
        digests = [self.tracked.state_digest()] * self.role.layout.world_size
        if self._groups.agreeing is not None:
            dist.all_gather_object(digests, digests[0], group=self._groups.agreeing)
        return of_job(digests)

    def close(self) -> None:
        self.gate.close()
        self._groups.close()


class PlainBlock(Step):
    """A block that is done once: what is raised in it ends the script."""

    def __init__(self, run: Unprotected, number: int, *, closing: bool) -> None:
        super().__init__(run, number, closing=closing, shadow=False)
        self._run = run
        self._agreed = False

    def ready(self, optimizer: Optimizer | None = None) -> None:
        """Where a job votes, the ranks agree when to stop and on the averages."""
        tracked = self._run.tracked
        if optimizer is not None and tracked.before_first_optimizer(optimizer):
            return
        if not self._agreed:
            self._agreed = True
            self.stopping = self._run.agree()

    def _open(self) -> None:
        self._run.tracked.open_for_good()
        self._run.gate.block = self
        self._run.admission.mode = Mode.ECHO

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.ready()
                self.committed = True
                self._run.committed(self)
        finally:
            self._run.gate.block = None
            self._run.admission.mode = Mode.CLOSED
