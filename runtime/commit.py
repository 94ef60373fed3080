"""Where a worker stands in the step commit protocol: pure decisions, no I/O.

The rules in capitals are those of docs/design/commit.md, found and checked with the exhaustive
model docs/design/check_commit.py; each stands here or in the mover's `decide`. One letter in
parentheses is the state's name in the model.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

KEEP = 2
"""KEEP2: versions of a neighbour's extras that a buddy keeps, n and n+1."""


class ProtocolError(Exception):
    """A position that the protocol excludes: a bug in this program, never the user's."""


class Phase(StrEnum):
    EMPTY = "empty"
    """(S) holds no state of the job."""
    COMPUTING = "computing"
    """(C) in step `committed`, before its gradients are done; also between two blocks."""
    GATHERED = "gathered"
    """(G) gradients done, extras for the next step sent."""
    VOTED = "voted"
    """(V) voted ok, waits for the result."""
    APPLYING = "applying"
    """(O) knows the commit; from the vote's result to the end of the block."""
    POISONED = "poisoned"
    """(P, F) the generation ended, or the step failed, before its ok vote."""
    HOLDING = "holding"
    """(H) the generation ended after its ok vote: it may or may not be committed."""
    ENDED = "ended"
    """(B) told abort, or the generation ended at or after a boundary."""
    FROZEN = "frozen"
    """(Z) at a boundary, its generation alive: every rank stops there for a planned switch."""
    READY = "ready"
    """(R) at the target of generation `ready_for`."""
    DONE = "done"
    """(D) has committed every step."""


_ENDED = frozenset({Phase.EMPTY, Phase.POISONED, Phase.HOLDING, Phase.ENDED, Phase.READY})


class Position(NamedTuple):
    """A tuple, since five new ones are made a step: `_replace` costs a quarter of a dataclass's."""

    generation: int = 0
    """Runs in it, or ran last; 0: none."""
    phase: Phase = Phase.EMPTY
    committed: int = 0
    """Steps it knows committed and applied; in APPLYING the open one is counted at its end."""
    extras: int = 0
    """Version of the extras it would start its next step with."""
    promised: int = 0
    """PROMISE: highest generation it answered a collect for."""
    ready_for: int = 0
    dirty: bool = False
    """TAIL: a collective after the vote was poisoned, its state cannot be trusted."""
    kept: Mapping[int, tuple[int, ...]] = MappingProxyType({})
    """Rank -> versions of its extras kept here, ascending."""
    freeze: int = 0
    """Planned generation for which it asks to freeze in its next vote, or for which the result
    of the vote says so, or for which it is frozen; 0: none."""
    thawed: int = 0
    """REMEMBER: highest planned generation that it was told is dropped."""

    @property
    def ended(self) -> bool:
        """CUT: nothing of the generation it ran in counts any more."""
        return self.promised > self.generation or self.phase in _ENDED

    @property
    def known_committed(self) -> int:
        """Steps that are certain to be applied: APPLYING counts the open one."""
        return self.committed + (self.phase is Phase.APPLYING)


# ---- within a step


def gathered(p: Position) -> Position:
    """The gradients of the open step are done and the extras of the next one are sent."""
    _expect(p, Phase.COMPUTING)
    return p._replace(phase=Phase.GATHERED, extras=p.committed + 1)


def keep(p: Position, generation: int, rank: int, version: int) -> Position:
    """Store a neighbour's extras. KEEP2; XKNOW: version n+2 proves the commit of step n.

    CUT: a worker that ended its generation stores nothing more of it. REBUDDY: one that is ready
    for the next generation stores what that one starts with.
    """
    running = generation == p.generation and not p.ended
    if not running and not (p.phase is Phase.READY and generation == p.ready_for == p.promised):
        return p
    versions = tuple(sorted({*p.kept.get(rank, ()), version}))[-KEEP:]
    p = p._replace(kept={**p.kept, rank: versions})
    if p.phase is Phase.VOTED and version == p.committed + 2:
        return p._replace(phase=Phase.APPLYING, freeze=0)
    return p


def may_vote(p: Position, neighbours: tuple[int, ...]) -> bool:
    """A rank votes ok only when its neighbours' extras of the next step are here."""
    version = p.committed + 1
    return p.phase is Phase.GATHERED and all(version in p.kept.get(r, ()) for r in neighbours)


def voted(p: Position) -> Position:
    """Sent its ok vote to its parent in the tree (the root never waits here)."""
    _expect(p, Phase.GATHERED)
    return p._replace(phase=Phase.VOTED)


def result(p: Position, generation: int, step: int, commit: bool, freeze: int = 0) -> Position:
    """The vote's result, or a FASTFAIL abort that overtakes the votes.

    With `freeze` every rank stops at the end of the block, for that planned generation. Ignored
    when the generation has ended here (CUT), or when it is of another step.
    """
    if p.ended or generation != p.generation or step != p.committed:
        return p
    if commit and p.phase is Phase.APPLYING:
        return p  # XKNOW said so before.
    if commit:
        # The root combines in GATHERED, the others wait in VOTED.
        _expect(p, Phase.VOTED, Phase.GATHERED)
        return p._replace(phase=Phase.APPLYING, freeze=freeze)
    _expect(p, Phase.COMPUTING, Phase.GATHERED, Phase.VOTED)
    return p._replace(phase=Phase.ENDED)


def failed(p: Position) -> Position:
    """FASTFAIL: this rank cannot finish the open step; it votes failed, owes no extras, and waits.

    After its own ok vote only the result or a new generation can say (HOLDING); in APPLYING the
    commit stands and `applied` decides.
    """
    match p.phase:
        case Phase.COMPUTING | Phase.GATHERED:
            return p._replace(phase=Phase.POISONED)
        case Phase.VOTED:
            return p._replace(phase=Phase.HOLDING)
        case _:
            return p


def applied(p: Position, *, poisoned: bool, last: bool) -> Position:
    """The block of a committed step ended. TAIL: a collective poisoned since the vote is dirt."""
    _expect(p, Phase.APPLYING)
    done, dirty, freeze = p.committed + 1, p.dirty or poisoned, 0
    if last and not dirty:
        phase = Phase.DONE
    elif poisoned or p.promised > p.generation:
        phase = Phase.ENDED
    elif p.freeze > p.thawed:
        phase, freeze = Phase.FROZEN, p.freeze
    else:
        phase = Phase.COMPUTING
    return p._replace(phase=phase, committed=done, extras=done, dirty=dirty, freeze=freeze)


# ---- a planned switch


def freeze(p: Position, generation: int) -> Position:
    """Ask in the next vote that all ranks stop at its boundary, for planned `generation`.

    REMEMBER: not for one that was dropped; and not where another is asked for, or promised.
    """
    asked = p.freeze or generation <= max(p.generation, p.thawed) or p.promised > generation
    if asked or p.phase not in (Phase.COMPUTING, Phase.GATHERED):
        return p
    return p._replace(freeze=generation)


def thaw(p: Position, generation: int) -> Position:
    """Nothing up to planned `generation` will come: who is frozen goes on where it stands.

    PROMISE: nothing that is decided can be dropped any more.
    """
    if generation <= max(p.generation, p.thawed) or p.promised >= generation:
        return p
    p = p._replace(thawed=generation)
    if not 0 < p.freeze <= generation:
        return p
    frozen = p.phase is Phase.FROZEN
    return p._replace(freeze=0, phase=Phase.COMPUTING if frozen else p.phase)


# ---- after a failure, or a freeze


def collect(p: Position, generation: int) -> Position | None:
    """CUT and PROMISE: end the running generation, then answer from facts that cannot change.

    None: refused, a higher generation was promised or runs already. Asked again for the same
    generation, nothing changes and the answer is the same.
    """
    if generation < p.promised or generation <= p.generation:
        return None
    if generation == p.promised:
        return p
    p = failed(p._replace(promised=generation))
    # Between two blocks COMPUTING has become POISONED: there is nothing to undo then.
    return p._replace(phase=Phase.ENDED) if p.phase is Phase.READY else p


def obey(p: Position, generation: int, target: int) -> Position | None:
    """DECIDED: drop the open step, or commit the one that is held.

    None: PROMISE, another generation than the promised one says so; or not yet at a boundary.
    Raises ProtocolError for a target that no correct decision can name.
    """
    if p.promised != generation or generation <= p.generation or p.phase is Phase.APPLYING:
        return None
    if p.phase is Phase.READY and p.ready_for >= generation:
        return p
    if p.phase is Phase.EMPTY:
        return None
    if p.committed == target:
        p = _fresh(p, target)
        return p._replace(phase=Phase.READY, ready_for=generation, extras=target, freeze=0)
    if p.phase is Phase.HOLDING and p.committed == target - 1:
        return p._replace(phase=Phase.APPLYING, freeze=0)
    raise ProtocolError(
        f"generation {generation} continues from {target} committed steps, this worker has "
        f"{p.committed} and is {p.phase}: no correct decision says that"
    )


def restored(p: Position, generation: int, target: int) -> Position | None:
    """A joiner or a dirty worker has the donor's state in place. None: PROMISE forbids it."""
    waits = p.phase is Phase.EMPTY or (p.phase is Phase.READY and p.ready_for == generation)
    if p.promised != generation or not waits:
        return None
    return _fresh(p, target)._replace(
        phase=Phase.READY,
        ready_for=generation,
        committed=target,
        extras=target,
        dirty=False,
    )


def resume(p: Position, generation: int, target: int, *, last: bool) -> Position | None:
    """Run in `generation`. None: PROMISE or another generation; or it is not ready for it.

    DIRTYACK, invariant 9: a worker that is dirty or elsewhere than the target never resumes.
    """
    if p.promised != generation or p.phase is not Phase.READY or p.ready_for != generation:
        return None
    if p.dirty or p.committed != target or p.extras != target:
        raise ProtocolError(
            f"generation {generation} resumes at {target} committed steps, this worker has "
            f"{p.committed}, extras {p.extras}{', dirty' if p.dirty else ''}"
        )
    return p._replace(generation=generation, phase=Phase.DONE if last else Phase.COMPUTING)


def _fresh(p: Position, target: int) -> Position:
    """Extras beyond the target belong to an attempt that never was: the retry sends its own."""
    kept = {rank: tuple(v for v in vs if v <= target) for rank, vs in p.kept.items()}
    return p._replace(kept=kept)


def _expect(p: Position, *phases: Phase) -> None:
    if p.phase not in phases:
        raise ProtocolError(f"expected {' or '.join(phases)}, the worker is {p.phase}")
