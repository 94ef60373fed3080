"""The product's positions and its mover beside the exhaustive model of the commit protocol.

The model is docs/design/check_commit.py. A worker of it is a tuple and a letter; here stands
which `Position` of the product means the same.
"""

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.unit.planner_histories import J, announced, member, plan, submitted

from trainmover.runtime import commit
from trainmover.runtime.commit import Phase, Position
from trainmover.runtime.seat import Orders, Seat
from trainmover.schemas.base import Event
from trainmover.schemas.commands import Answer, Stage
from trainmover.schemas.events import (
    LayoutAssigned,
    MigrationDecided,
    MigrationPlanned,
    MigrationPrepared,
    MigrationSwitched,
)
from trainmover.schemas.recorded import Recorded
from trainmover.services.contract import Inputs, Output
from trainmover.services.mover import decide as mover
from trainmover.services.mover.state import State, evolve

ROOT = Path(__file__).parents[2]
WORKERS = "abcdef"
HISTORIES: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("commit_histories.json").read_text(encoding="ascii")
)
"""Rule -> the model's shortest history without it, its scenario, and what is wrong at its end."""


def _load() -> Any:
    path = ROOT / "docs/design/check_commit.py"
    spec = importlib.util.spec_from_file_location("check_commit", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFERENCE = _load()
ARGUMENTS: dict[str, dict[str, Any]] = {name: args for name, _, args, _, _ in REFERENCE.SCENARIOS}

WORLD = 3
ST, GEN, PH, AP, EX, PR, RD, BAD, STO, FZ, AB = range(11)
"""Fields of a worker in the model."""
Assignments = tuple[tuple[int, ...], ...]
"""Workers in rank order, from generation 1 on."""

CUT_OFF = (Phase.POISONED, Phase.ENDED)
PHASES = {
    "S": (Phase.EMPTY,),
    "C": (Phase.COMPUTING,),
    "G": (Phase.GATHERED,),
    "V": (Phase.VOTED,),
    "O": (Phase.APPLYING,),
    "P": CUT_OFF,
    "F": CUT_OFF,
    "B": CUT_OFF,
    "H": (Phase.HOLDING,),
    "R": (Phase.READY,),
    "Z": (Phase.FROZEN,),
    "D": (Phase.DONE,),
}


def reference(scenario: str, *without: str) -> Any:
    """The model of a scenario with all rules but those named."""
    rules = tuple(rule for rule in REFERENCE.ALLRULES if rule not in without)
    return REFERENCE.Model(rules=rules, **ARGUMENTS[scenario])


def replay(model: Any, labels: Sequence[str]) -> Iterator[tuple[Any, str, Any]]:
    """State, label, state. AssertionError for a label that is not possible in its place."""
    state = model.initial()
    for label in labels:
        moves = (after for said, after, _ in model.successors(state) if said == label)
        found = next((after for after in moves if after != state), None)
        assert found is not None, f"the model does not allow: {label}"
        after = model.gc(found)
        yield state, label, after
        state = after


def wrong_end(model: Any, state: Any) -> str:
    """What the model's search would say of a state where it must stop; empty if it goes on."""
    try:
        moves = list(model.successors(state))
        if any(after != state and not fault for _, after, fault in moves):
            return ""
        name = model.verdict(state)
    except REFERENCE.Violation as violation:
        return str(violation)
    if name is None:
        return "deadlock without a named cause"
    return f"a fault that should cost no step: {name}"


@dataclass
class Product:
    """What the workers and the mover of the product know after the same steps as the model."""

    model: Any
    late: bool = False
    """The block of a committed step ends only when something else happens to its worker."""
    early: bool = False
    """Extras arrive as soon as they are sent; in the model only with the vote that needs them."""
    positions: list[Position] = field(default_factory=list)
    gave_up: frozenset[int] = frozenset()
    """Voted failed: the product ends the step at once, the model when the result comes."""
    answers: dict[tuple[int, int], dict[str, Answer]] = field(default_factory=dict)
    """(Generation, attempt) -> what its members answered, the block of a committed step over."""
    at_once: dict[tuple[int, int], dict[str, Answer]] = field(default_factory=dict)
    """The same, answered before the end of that block."""
    leavers: Mapping[int, int] = field(default_factory=dict)
    """Planned generation -> the worker that is to give its rank away."""
    lost: frozenset[int] = frozenset()
    """Generations for which the mover finds state lost: it aborts the plan, or begins again."""

    def __post_init__(self) -> None:
        running = Position(generation=1, phase=Phase.COMPUTING, promised=1)
        # REBUDDY: also the first generation starts with every rank's extras at its buddy.
        ranks = [commit.keep(running, 1, (rank - 1) % WORLD, 0) for rank in range(WORLD)]
        self.positions = [*ranks, *(Position() for _ in range(self.model.standbys))]

    def fork(self) -> "Product":
        """A copy that goes its own way."""
        other = copy(self)
        other.positions = list(self.positions)
        other.leavers = dict(self.leavers)
        other.answers = {key: dict(said) for key, said in self.answers.items()}
        other.at_once = {key: dict(said) for key, said in self.at_once.items()}
        return other

    def put(self, worker: int, position: Position | None) -> None:
        """The outcome of a decision function that the model says is obeyed."""
        assert position is not None, f"worker {worker} refuses, it is {self.positions[worker]}"
        self.positions[worker] = position

    def block_ended(self, p: Position, *, poisoned: bool) -> Position:
        return commit.applied(p, poisoned=poisoned, last=p.committed + 1 == self.model.N)

    def end_block(self, worker: int, *, poisoned: bool) -> None:
        p = self.positions[worker]
        if p.phase is Phase.APPLYING:
            self.positions[worker] = self.block_ended(p, poisoned=poisoned)

    def end_quiet_block(self, worker: int) -> None:
        """Where nothing communicates after the vote the model ends the block with the vote."""
        if self.model.opt is None:
            self.end_block(worker, poisoned=False)

    def answer(self, worker: int, stage: Stage | None = None) -> Answer:
        """What the worker's runtime answers, by the product's own code."""
        p = self.positions[worker]
        seat = Seat(WORKERS[worker], lambda: None)
        seat.position, seat.set_up = p, True
        seat.orders = Orders(about=p.promised)
        seat.stage = stage_of(p) if stage is None else stage
        return seat.answer()


def stage_of(p: Position) -> Stage:
    """How far a runtime is towards the generation that it promised."""
    if p.generation == p.promised:
        return Stage.RESUMED
    if p.phase is Phase.READY and p.ready_for == p.promised:
        return Stage.OBEYED if p.dirty else Stage.RESTORED
    return Stage.OBEYED if p.phase is Phase.EMPTY else Stage.COLLECTED


def words(answer: Answer) -> str:
    """An answer as the model puts it."""
    if answer.empty:
        return "empty"
    if answer.dirty:
        return f"{answer.committed} committed, dirty"
    if answer.holding:
        return f"holding step {answer.committed}"
    return f"{answer.committed} steps committed"


# ---- comparison


def differences(product: Product, state: Any) -> Iterator[str]:
    """Where the position of a live worker is not what the model says."""
    workers, assignments = state[0], state[1]
    for i, w in enumerate(workers):
        if w[ST] != "u":
            continue
        p = product.positions[i]
        if p.phase is Phase.APPLYING and product.model.opt is None:
            p = product.block_ended(p, poisoned=False)
        if p.phase not in _phases(product, i, w):
            yield f"worker {i} is {p.phase}, in the model {w}"
        said = (p.generation, p.committed, p.extras, p.promised, p.ready_for, p.dirty)
        # Generation 1 is promised from its start on, without a collect.
        meant = (w[GEN], w[AP], w[EX], max(w[PR], w[GEN]), w[RD], w[BAD] == 2)
        if said != meant:
            yield f"worker {i} says {said}, the model {meant}: {w}"
        of_meaning = w[PH] in "CGVOZ" and p.phase is not Phase.ENDED
        freeze = w[FZ] if of_meaning else p.freeze
        if (p.freeze, p.thawed) != (freeze, w[AB]):
            yield f"worker {i} freezes for {p.freeze}, not for {p.thawed}: in the model {w}"
        if not _keeps(product, i, w, assignments):
            yield f"worker {i} keeps {dict(p.kept)}, in the model {w[STO]:b}: {w}"


def _phases(product: Product, i: int, w: Any) -> tuple[Phase, ...]:
    if w[PH] in "VH" and i in product.gave_up:
        # The product is rightly stricter: a step with a failed vote is never committed.
        return CUT_OFF
    if w[PH] == "R" and w[PR] > w[RD]:
        return CUT_OFF
    if w[PH] == "Z" and product.late and product.positions[i].ended:
        return (Phase.FROZEN, Phase.ENDED)  # it was told of a new plan before its block ended
    return PHASES[w[PH]]


def _keeps(product: Product, i: int, w: Any, assignments: Assignments) -> bool:
    kept = dict(product.positions[i].kept)
    ranks = [a.index(i) for a in assignments if i in a]
    versions = set(kept.pop((ranks[-1] - 1) % WORLD, ())) if ranks else set()
    meant = {v for v in range(w[STO].bit_length()) if w[STO] >> v & 1}
    if kept:
        return False
    if product.early:
        # A version that came early may have pushed out one from before the open step.
        meant = {v for v in meant if v >= w[AP]}
        return meant <= versions and (w[PH] != "R" or max(versions, default=0) <= w[AP])
    return versions == meant


# ---- the mover over the model's assignments


@lru_cache(maxsize=1024)
def plan_of(
    assignments: Assignments, generation: int, leaver: int | None = None
) -> MigrationPlanned:
    before, after = assignments[generation - 2], assignments[generation - 1]
    swaps = enumerate(zip(before, after, strict=True))
    made = plan(
        generation,
        *((rank, WORKERS[x], WORKERS[y]) for rank, (x, y) in swaps if x != y),
        members=_members(after),
        reason="the model says so",
    )
    if leaver is None:
        return made
    leavers = (member(before.index(leaver), WORKERS[leaver]),)
    return made.model_copy(update={"kind": "planned", "leavers": leavers})


@lru_cache(maxsize=1024)
def mover_state(
    assignments: Assignments,
    generation: int,
    target: int | None = None,
    switched: bool = False,
    leaver: int | None = None,
) -> State:
    """The mover's fold over the plan, the decision for `target`, and `migration.switched`.

    With `leaver` it is a planned switch whose joiner is prepared.
    """
    words = {**J, "generation": generation, "incident": "g2", "target": target}
    events: list[Event] = [
        submitted(),
        LayoutAssigned(**J, members=_members(assignments[0])),
        plan_of(assignments, generation, leaver),
    ]
    if leaver is not None:
        events += [announced(WORKERS[leaver]), MigrationPrepared.model_validate(words)]
    if target is not None:
        events.append(MigrationDecided.model_validate(words))
    if switched:
        events.append(MigrationSwitched.model_validate(words))
    state = State()
    for seq, event in enumerate(events, 1):
        state = evolve(state, Recorded(seq=seq, time_s=0.0, event=event))
    return state


def mover_says(state: State, answers: Mapping[str, Answer], now_s: float = 0.0) -> Sequence[Output]:
    return mover.decide(state, Inputs(now_s=now_s, up_since_s=0.0, answers=answers))


def _members(assignment: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(member(rank, WORKERS[x]) for rank, x in enumerate(assignment))
