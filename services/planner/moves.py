"""Which planned switch comes next: who asks for it, and whose ranks move."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from trainmover.schemas.events import InterruptionAnnounced
from trainmover.schemas.member import Member
from trainmover.services.planner.state import Phase, State

MAX_TRIES = 3
"""Plans with the same members that may fail in a row, and planned switches of one worker until it
is announced again: more have the same cause again."""


@dataclass(frozen=True, slots=True)
class Move:
    """All that can move now. The ranks of an interruption move as one."""

    leavers: Mapping[str, Member] = field(default_factory=dict)
    causes: tuple[InterruptionAnnounced, ...] = ()
    num_short: int = 0
    """Ranks whose interruption needs more standbys than are free."""

    @property
    def joiners(self) -> dict[str, str]:
        """Leaver -> the standby that was named for it."""
        return {leaver: w for cause in self.causes for leaver, w in cause.joiners.items()}


def move(state: State) -> Move:
    """The earliest deadline first; what is too large waits, and others do not wait for it.

    `state` has no pending switch, or it is asked what would move without that.
    """
    found, num_free = Move(), len(state.free)
    for interruption in sorted(state.interruptions.standing, key=_deadline_s):
        asked = leavers(state, interruption)
        together = {**found.leavers, **asked}
        if asked and len(together) <= num_free:
            found = Move(together, (*found.causes, interruption), found.num_short)
        elif asked:
            short = len(asked.keys() - found.leavers.keys())
            found = Move(found.leavers, found.causes, found.num_short + short)
    return found


def leavers(state: State, interruption: InterruptionAnnounced) -> dict[str, Member]:
    """Worker -> the member of the assignment in force that it still has to move."""
    return {
        m.worker: m
        for m in state.latest.members
        if interruption.concerns(m.worker, m.machine)
        if state.attempts.get(m.worker, 0) < MAX_TRIES
    }


def urgent(state: State, found: Move) -> bool:
    """Whether a pending switch gives way: a preemption came that it does not cover.

    One whose joiners are prepared is nearly done, and is left to end.
    """
    assert state.pending is not None
    covered = {m.worker for m in state.pending.leavers}
    preempted = {
        worker
        for cause in found.causes
        if cause.kind == "preemption"
        for worker in leavers(state, cause)
    }
    return state.pending.phase is Phase.PLANNED and bool(preempted - covered)


def refusals(state: State) -> Iterator[tuple[InterruptionAnnounced, str]]:
    """Interruptions that ask for what cannot be had, and why. Preemptions cannot be refused."""
    assert state.submitted is not None
    limit = inf if state.submitted.max_planned is None else state.submitted.max_planned
    free = [w.worker for w in state.free]
    for interruption in state.interruptions.standing:
        asked = leavers(state, interruption)
        named = [joiner for leaver, joiner in interruption.joiners.items() if leaver in asked]
        taken = [w for w in named if w not in free or named.count(w) > 1]
        if taken:
            yield interruption, f"{taken[0]} is no free standby; free: {', '.join(free) or 'none'}"
        elif interruption.kind != "preemption" and asked and state.num_moved + len(asked) > limit:
            so_far = f"{len(asked)} asked to move, {state.num_moved} moved already"
            yield interruption, f"{so_far}, at most {limit} may (--max-planned)"


def _deadline_s(interruption: InterruptionAnnounced) -> float:
    return inf if interruption.deadline is None else interruption.deadline
