"""Moves that were asked for and are not decided: what moves where, since when, and why not yet."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from trainmover.cli.phrases import clock, names, printable, ranks_in_words
from trainmover.schemas.events import InterruptionAnnounced
from trainmover.schemas.member import Member
from trainmover.schemas.recorded import Recorded
from trainmover.services.planner.moves import MAX_TRIES
from trainmover.services.planner.state import Phase, State, evolve


class Pending(BaseModel):
    """An interruption whose ranks have not moved yet, or not all of them."""

    model_config = ConfigDict(frozen=True)

    interruption: str
    kind: str
    reason: str
    ranks: tuple[int, ...]
    """That are still to move."""
    leavers: tuple[str, ...]
    joiners: tuple[str, ...]
    """Empty: not planned yet."""
    since: float
    """When it was announced, seconds since 1970."""
    deadline: float | None = None
    """When they are gone at the latest, seconds since 1970."""
    waits_for: str

    def in_words(self) -> str:
        """One line."""
        to = f" -> {names(self.joiners)}" if self.joiners else ""
        by = f" by {clock(self.deadline)}" if self.deadline is not None else ""
        why = f": {printable(self.reason)}" if self.reason else ""
        return (
            f"{ranks_in_words(self.ranks)} {names(self.leavers)}{to}{by}, asked for at"
            f" {clock(self.since)} ({self.interruption}, {self.kind}{why}); waits for"
            f" {self.waits_for}"
        )


def pending(records: Sequence[Recorded]) -> tuple[Pending, ...]:
    """Of the stream of one run, the oldest first; none before ranks are assigned, nor at the end.

    What keeps a move from being planned is read from the planner's own state.
    """
    state, since = State(), dict[str, float]()
    for record in records:
        state = evolve(state, record)
        if isinstance(record.event, InterruptionAnnounced):
            since.setdefault(record.event.interruption, record.time_s)
    if state.over or not state.assignments:
        return ()
    found = []
    for event in state.interruptions.standing:
        leaving = [m for m in state.latest.members if event.concerns(m.worker, m.machine)]
        if leaving:
            found.append(_pending(state, event, leaving, since[event.interruption]))
    return tuple(found)


def _pending(
    state: State, event: InterruptionAnnounced, leaving: Sequence[Member], since: float
) -> Pending:
    planned = state.pending.replacements if state.pending else ()
    leavers = tuple(m.worker for m in leaving)
    return Pending(
        interruption=event.interruption,
        kind=event.kind,
        reason=event.reason,
        ranks=tuple(m.rank for m in leaving),
        leavers=leavers,
        joiners=tuple(r.joiner for r in planned if r.leaver in leavers),
        since=since,
        deadline=event.deadline,
        waits_for=_waits_for(state, leavers),
    )


def _waits_for(state: State, leavers: Sequence[str]) -> str:
    if state.pending is not None:
        joiners = [r.joiner for r in state.pending.replacements if r.leaver in leavers]
        if not joiners:
            return f"the end of the move before it (generation {state.pending.generation})"
        if state.pending.phase is Phase.PREPARED:
            return "every rank to come to the end of a step"
        return f"{names(joiners)} to be set up, while training goes on"
    if not state.started:
        return "the start of the job"
    if state.latest.phase is not Phase.RUNNING:
        return f"the end of incident {state.latest.incident}"
    if all(state.attempts.get(worker, 0) >= MAX_TRIES for worker in leavers):
        return f"nothing any more: {MAX_TRIES} tries failed; announce it again"
    num_free = len(state.free)
    if num_free < len(leavers):
        standbys = "a standby" if len(leavers) == 1 else f"{len(leavers)} standbys"
        return f"{standbys}: {num_free or 'none'} {'are' if num_free > 1 else 'is'} free"
    return "its plan"
