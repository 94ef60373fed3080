"""What a job's stream says of one machine: who there holds a rank, who has to go, if it drains."""

from dataclasses import dataclass, field, replace

from trainmover.schemas.base import Event
from trainmover.schemas.events import (
    LayoutAssigned,
    MigrationAborted,
    MigrationDecided,
    MigrationPlanned,
    MigrationSwitched,
)
from trainmover.schemas.interruptions import Interruptions
from trainmover.schemas.member import Member

LEAVER_LINGERS_S = 0.5
"""A replaced worker is killed after this: it may be stopped or hung (commit.md, RESET)."""
RETIRE_WITHIN_S = 5.0
"""Whom the mover retires goes by itself: it is told to, then made to, after this time."""


@dataclass(frozen=True, slots=True)
class Tenure:
    machine: str
    holders: frozenset[str] = frozenset()
    """Workers of this machine that hold a rank."""
    pending: MigrationPlanned | None = None
    """A planned switch that is not switched to."""
    decided: bool = False
    """`pending` is: its joiners have no way back to the standbys."""
    interruptions: Interruptions = field(default_factory=Interruptions)

    @property
    def drained(self) -> bool:
        """Whether no rank is given to this machine, so that fresh workers would be of no use."""
        return bool(self.interruptions.drains(self.machine))

    def after(self, event: Event) -> "Tenure":
        """With one more event of the stream."""
        match event:
            case LayoutAssigned(members=members):
                return replace(self, holders=self._here(members))
            case MigrationPlanned(kind="planned"):
                return replace(self, pending=event, decided=False)
            case MigrationPlanned(members=members):
                return replace(self, pending=None, decided=False, holders=self._here(members))
            case MigrationDecided(generation=g) if self.pending and g == self.pending.generation:
                return replace(self, decided=True)
            case MigrationSwitched(generation=g) if self.pending and g == self.pending.generation:
                return replace(self, pending=None, holders=self._here(self.pending.members))
            case MigrationAborted() if self.pending and self._drops(event):
                return replace(self, pending=None)
            case _:
                return replace(self, interruptions=self.interruptions.after(event))

    def let_go(self, event: Event) -> dict[str, float]:
        """RESET: worker, of any machine, that must go now -> seconds until it is killed.

        The mover retires leavers and joiners of planned switches; who does not go hangs.
        """
        pending = self.pending
        joiners = {r.joiner for r in pending.replacements} if pending else set()
        match event:
            case MigrationPlanned(kind="planned"):
                return {}
            case MigrationPlanned(replacements=replacements, members=members):
                spare = joiners - {m.worker for m in members} if self.decided else set()
                lost = {r.leaver: LEAVER_LINGERS_S for r in replacements}
                return {**dict.fromkeys(spare, RETIRE_WITHIN_S), **lost}
            case MigrationSwitched(generation=g) if pending and g == pending.generation:
                return {m.worker: RETIRE_WITHIN_S for m in pending.leavers}
            case MigrationAborted(missing=missing) if pending and self._drops(event):
                return dict.fromkeys(joiners & set(missing), RETIRE_WITHIN_S)
            case _:
                return {}

    def _drops(self, event: MigrationAborted) -> bool:
        assert self.pending is not None
        return event.generation == self.pending.generation and not self.decided

    def _here(self, members: tuple[Member, ...]) -> frozenset[str]:
        return frozenset(m.worker for m in members if m.machine == self.machine)
