"""What the product's decision functions do in each step of the exhaustive commit model.

The model's labels say which function it is; the checks that need the mover stand here too.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.unit.commit_model import (
    AP,
    GEN,
    PH,
    RD,
    ST,
    STO,
    WORKERS,
    WORLD,
    Product,
    mover_says,
    mover_state,
    words,
)

from trainmover.runtime import commit
from trainmover.runtime.commit import Phase, Position
from trainmover.schemas.commands import Pull, Stage
from trainmover.schemas.events import MigrationAborted, MigrationDecided, MigrationSwitched
from trainmover.services.contract import Ask


@dataclass(frozen=True)
class Move:
    """A step of the model: the states around it, and what its label says."""

    before: Any
    after: Any
    says: re.Match[str]

    @property
    def worker(self) -> int:
        return int(self.says["i"])

    @property
    def generation(self) -> int:
        """In which the worker runs, or ran last."""
        return int(self.before[0][self.worker][GEN])

    @property
    def rank(self) -> int:
        """The worker's, in that generation."""
        return int(self.before[1][self.generation - 1].index(self.worker))

    def number(self, name: str) -> int:
        return int(self.says[name])

    @property
    def freeze(self) -> int:
        """For which planned generation the result of this worker's vote says to freeze."""
        about = ("R", self.generation, self.number("n"))
        said = {m for m in (*self.before[4], *self.after[4]) if m[:3] == about and m[4] == "c"}
        return max((m[5] for m in said), default=0)


Step = Callable[[Product, Move], None]


def follow(product: Product, before: Any, label: str, after: Any) -> None:
    """Do what the product does in this step. AssertionError or ProtocolError: it would not."""
    step, says = _found(label)
    move = Move(before, after, says)
    if "i" in says.groupdict() and step not in (_answers, _hears_extras):
        product.end_quiet_block(move.worker)
    step(product, move)
    if not product.late:
        for worker in range(len(product.positions)):
            product.end_quiet_block(worker)


def step_of(label: str) -> Step:
    """The function of this module that a label names."""
    return _found(label)[0]


def _found(label: str) -> tuple[Step, re.Match[str]]:
    for pattern, step in STEPS:
        says = re.match(pattern, label)
        if says is not None:
            return step, says
    raise AssertionError(f"no function of the product is known for: {label}")


# ---- within a step


def _gathers(product: Product, move: Move) -> None:
    product.put(move.worker, commit.gathered(product.positions[move.worker]))
    if product.early:
        buddy = move.before[1][move.generation - 1][(move.rank + 1) % WORLD]
        p = product.positions[buddy]
        product.put(buddy, commit.keep(p, move.generation, move.rank, move.number("v")))


def _hears_extras(product: Product, move: Move) -> None:
    p = product.positions[move.worker]
    rank, version = move.number("p"), move.number("v")
    product.put(move.worker, commit.keep(p, move.generation, rank, version))


def _has_all_for_its_vote(product: Product, move: Move) -> None:
    i, neighbour = move.worker, (move.rank - 1) % WORLD
    version = move.number("n") + 1
    product.put(i, commit.keep(product.positions[i], move.generation, neighbour, version))
    assert commit.may_vote(product.positions[i], (neighbour,)), product.positions[i]


def _votes_ok(product: Product, move: Move) -> None:
    _has_all_for_its_vote(product, move)
    product.put(move.worker, commit.voted(product.positions[move.worker]))


def _votes_failed(product: Product, move: Move) -> None:
    _has_all_for_its_vote(product, move)
    _gives_up(product, move)


def _combines_to_commit(product: Product, move: Move) -> None:
    _has_all_for_its_vote(product, move)
    _hears_result(product, move)


def _hears_result(product: Product, move: Move) -> None:
    p, ok = product.positions[move.worker], move.says["what"] == "commit"
    step, freeze = move.number("n"), move.freeze
    product.put(move.worker, commit.result(p, move.generation, step, ok, freeze))


def _gives_up(product: Product, move: Move) -> None:
    product.gave_up |= {move.worker}
    product.put(move.worker, commit.failed(product.positions[move.worker]))


def _ends_clean(product: Product, move: Move) -> None:
    product.end_block(move.worker, poisoned=False)


# ---- a planned switch


def _is_planned(product: Product, move: Move) -> None:
    product.leavers = {**product.leavers, move.number("g"): move.number("l")}


def _hears_freeze(product: Product, move: Move) -> None:
    p = product.positions[move.worker]
    product.put(move.worker, commit.freeze(p, move.number("g")))


def _hears_drop(product: Product, move: Move) -> None:
    p = product.positions[move.worker]
    product.put(move.worker, commit.thaw(p, move.number("g")))


def _all_frozen(product: Product, move: Move) -> None:
    """WAL: `migration.decided` comes before any command of the planned switch."""
    workers, assignments, generation = move.before[0], move.before[1], move.number("g")
    leaver = product.leavers[generation]
    for x in assignments[generation - 2]:
        product.end_quiet_block(x)  # it says that it is frozen when that is over
    asked = {*assignments[generation - 1], leaver}
    if any(workers[x][ST] != "u" for x in asked):
        return  # Nobody knows of the crash yet, and the dead give no answers here.
    joiner = next(x for x in assignments[generation - 1] if workers[x][GEN] == 0)
    answers = {WORKERS[x]: product.answer(x) for x in asked}
    answers[WORKERS[joiner]] = product.answer(joiner).model_copy(update={"prepared": generation})
    state = mover_state(assignments, generation, leaver=leaver)
    if any(product.positions[x].phase is not Phase.FROZEN for x in asked - {joiner}):
        return  # Somebody said so once and has promised another generation since.
    (said,) = mover_says(state, answers)
    assert isinstance(said, MigrationDecided), said
    assert said.target == workers[leaver][AP], said
    (source,) = said.sources
    assert source.extras_from == source.donors[0] == WORKERS[leaver], said


# ---- after a failure, or a freeze


def _answers(product: Product, move: Move) -> None:
    i, key = move.worker, (move.number("g"), move.number("k"))
    communicates = product.model.opt is not None
    product.put(i, commit.collect(product.positions[i], move.number("g")))
    at_once = product.at_once.setdefault(key, {})
    at_once[WORKERS[i]] = product.answer(i)
    product.end_block(i, poisoned=communicates)
    answers = product.answers.setdefault(key, {})
    answers[WORKERS[i]] = product.answer(i)
    if i not in product.gave_up:
        assert words(answers[WORKERS[i]]) == move.says["words"]
        assert communicates or words(at_once[WORKERS[i]]) == move.says["words"]
    _is_all_or_nothing(product, move)


def _is_all_or_nothing(product: Product, move: Move) -> None:
    """ALL: while an answer is missing the mover only asks for it."""
    answers = product.answers[move.number("g"), move.number("k")]
    if move.number("g") in product.leavers:
        return  # A planned switch is decided before anybody is asked.
    state = mover_state(move.before[1], move.number("g"))
    silent = {m.worker for m in state.members} - answers.keys()
    if silent:
        said = mover_says(state, answers)
        assert {out.worker for out in said if isinstance(out, Ask)} == silent, said
        assert len(said) == len(silent), said


def _decides(product: Product, move: Move) -> None:
    generation, key = move.number("g"), (move.number("g"), move.number("k"))
    workers, assignments = move.before[0], move.before[1]
    if any(workers[x][ST] == "e" for x in assignments[generation - 1]):
        # The product need not decide: all had finished when one left, so the planner ends the job.
        finished = {(m[1], m[2]) for m in move.before[4] if m[0] == "N"}
        assert any(finished >= {(g, x) for x in a} for g, a in enumerate(assignments, 1))
        return
    for answers in (product.answers[key], product.at_once[key]):
        (said,) = mover_says(mover_state(assignments, generation), answers)
        if isinstance(said, MigrationDecided) and said.setup_again:
            # Where state is lost the model ends; with no step committed the product begins again.
            assert said.target == move.number("t") == 0, said
            product.lost |= {generation}
        elif isinstance(said, MigrationDecided):
            assert said.target == move.number("t"), said
            donors = [answers[name] for source in said.sources for name in source.donors]
            assert not any(donor.dirty or donor.empty for donor in donors), said
        else:
            assert isinstance(said, MigrationAborted), said
            assert said.state_lost, said
            product.lost |= {generation}


def _drops(product: Product, move: Move) -> None:
    p = commit.obey(product.positions[move.worker], move.number("g"), move.number("t"))
    product.gave_up -= {move.worker}
    product.put(move.worker, p)
    assert product.positions[move.worker].phase is Phase.READY


def _commits(product: Product, move: Move) -> None:
    i, generation, target = move.worker, move.number("g"), move.number("n") + 1
    product.put(i, commit.obey(product.positions[i], generation, target))
    # Whatever it communicates after the vote is poisoned: its peers have ended the generation.
    product.end_block(i, poisoned=product.model.opt is not None)
    product.put(i, commit.obey(product.positions[i], generation, target))


def _joins(product: Product, move: Move) -> None:
    i, target, w = move.worker, move.number("t"), move.after[0][move.worker]
    rank = move.after[1][w[RD] - 1].index(i)
    assert target in product.positions[move.number("b")].kept[rank]
    _pulls(product, move)
    product.put(i, commit.restored(product.positions[i], w[RD], target))
    if w[STO]:
        # REBUDDY: with the links switched the neighbour's extras come before the first step.
        neighbour = (rank - 1) % WORLD
        product.put(i, commit.keep(product.positions[i], w[RD], neighbour, target))


def _is_cleaned(product: Product, move: Move) -> None:
    _pulls(product, move)
    generation = move.before[0][move.worker][RD]
    p = commit.restored(product.positions[move.worker], generation, move.number("t"))
    product.put(move.worker, p)


def _pulls(product: Product, move: Move) -> None:
    """DIRTYACK: the mover names a clean donor, and for a joiner a holder of its own state."""
    i, target, donor = move.worker, move.number("t"), product.positions[move.number("d")]
    workers, assignments, current = move.before[:3]
    generation = product.positions[i].promised
    if generation in product.lost:
        return  # The product is rightly stricter: another rank of this plan can not be restored.
    if generation != current or donor.promised != generation:
        return  # And stricter: who promised a newer generation serves no older one.
    leaver = product.leavers.get(generation)
    members = [x for x in assignments[generation - 1] if workers[x][ST] == "u"]
    if leaver is not None and workers[leaver][ST] == "u":
        members.append(leaver)
        p = product.positions[leaver]
        if p.promised != generation or p.phase is not Phase.READY:
            return  # And stricter: a leaver that lives has obeyed before anybody takes its rank.
    answers = {WORKERS[x]: product.answer(x) for x in members}
    said = mover_says(mover_state(assignments, generation, target, leaver=leaver), answers)
    asked = [out.command for out in said if isinstance(out, Ask) and out.worker == WORKERS[i]]
    (pull,) = [command for command in asked if isinstance(command, Pull)]
    named = product.positions[WORKERS.index(pull.donor.worker)]
    assert (named.phase, named.committed, named.dirty) == (Phase.READY, target, False)
    if workers[i][PH] == "S":
        assert pull.extras_from is not None


def _says_lost(product: Product, move: Move) -> None:
    assert move.before[2] in product.lost, "the mover would go on"


def _all_ready(product: Product, move: Move) -> None:
    """WAL: `migration.switched` comes before any resume."""
    workers, assignments, generation = move.before[:3]
    members = assignments[generation - 1]
    assert generation not in product.lost, "the mover has aborted this plan"
    if any(workers[x][ST] != "u" for x in members):
        return  # Nobody knows of the crash yet, and the dead give no answers here.
    target = workers[members[0]][AP]
    leaver = product.leavers.get(generation)
    if leaver is not None and (
        workers[leaver][ST] != "u" or product.positions[leaver].promised != generation
    ):
        return
    asked = (*members, leaver) if leaver is not None else members
    answers = {WORKERS[x]: product.answer(x, Stage.SWITCHED) for x in asked}
    (said,) = mover_says(mover_state(assignments, generation, target, leaver=leaver), answers)
    assert isinstance(said, MigrationSwitched), said
    assert said.target == target, said


def _resumes(product: Product, move: Move) -> None:
    p, target = product.positions[move.worker], move.number("n")
    last = target == product.model.N
    product.put(move.worker, commit.resume(p, move.number("g"), target, last=last))


def _is_new(product: Product, move: Move) -> None:
    product.gave_up -= {move.worker}
    product.put(move.worker, Position())


def _nothing(product: Product, move: Move) -> None:
    """No worker of the product knows more or less than before."""


_W = r"worker (?P<i>\d) "
_R = _W + r"\((?:root|rank \d)\) "
_N = r"step (?P<n>\d)"
STEPS: tuple[tuple[str, Step], ...] = (
    (_R + rf"finishes the gradients of {_N}, sends extras (?P<v>\d)", _gathers),
    (_R + r"receives extras (?P<v>\d) of rank (?P<p>\d)", _hears_extras),
    (_R + rf"votes ok for {_N}", _votes_ok),
    (_R + rf"combines the votes of {_N}: (?P<what>commit)", _combines_to_commit),
    (_R + rf"combines the votes of {_N}: abort", _votes_failed),
    (_R + rf"votes failed for {_N}", _votes_failed),
    (_R + r"hears failed", _gives_up),
    (_R + r"passes failed on", _gives_up),
    (r"GLITCH: a link of " + _W, _gives_up),
    (_R + rf"hears (?P<what>abort) of {_N}", _hears_result),
    (_R + rf"receives the result of {_N}: (?P<what>commit|abort)", _hears_result),
    (_R + r"completes the collectives after the vote", _ends_clean),
    (
        _W + r"answers collect\(g(?P<g>\d), mover attempt (?P<k>\d)\): (?P<words>.*)",
        _answers,
    ),
    (
        r"mover \(attempt (?P<k>\d)\) decides for g(?P<g>\d) .*: target (?P<t>\d) steps",
        _decides,
    ),
    (_W + r"obeys g(?P<g>\d): target (?P<t>\d) steps; drops", _drops),
    (_W + rf"obeys g(?P<g>\d): commits {_N}", _commits),
    (
        r"joiner (?P<i>\d) \(rank \d\) pulls state (?P<t>\d) from worker (?P<d>\d) "
        r"and extras \d from worker (?P<b>\d)",
        _joins,
    ),
    (r"dirty " + _W + r"pulls state (?P<t>\d) from worker (?P<d>\d)", _is_cleaned),
    (r"extras of rank \d at \d are lost", _says_lost),
    (r"mover: all ready", _all_ready),
    (_W + rf"resumes in g(?P<g>\d) at {_N}", _resumes),
    (r"zombie (?P<i>\d) comes back", _is_new),
    (_R + r"leaves the job", _nothing),
    (_W + r"hears freeze for g(?P<g>\d)", _hears_freeze),
    (_W + r"hears that the migration to g(?P<g>\d) is aborted", _hears_drop),
    (r"mover: all are frozen; migration.decided g(?P<g>\d)", _all_frozen),
    (r"planner: planned migration g(?P<g>\d) \((?P<l>\d) -> \d\)", _is_planned),
    (r"CRASH|WRONG SUSPICION|MOVER|planner|mover: deadline", _nothing),
)
