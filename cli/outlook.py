"""What will become of an interruption: whose ranks move, who could take them, and by when."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainmover.cli.phrases import clock, duration, names
from trainmover.cli.view import View, view
from trainmover.schemas.events import InterruptionAnnounced, MigrationPlanned, MigrationPrepared
from trainmover.schemas.member import Member
from trainmover.schemas.recorded import Recorded
from trainmover.services.mover.ahead import HASTE_S
from trainmover.services.planner.state import State, evolve


@dataclass(frozen=True, slots=True)
class Outlook:
    """A job as someone sees it who is about to announce an interruption, or to cancel one."""

    view: View
    planner: State
    """Who is free and what stands, as the planner has it."""
    prepared_s: float | None
    """What the joiners of the last planned switch took to be ready; None: there was none."""

    def leaving(self, event: InterruptionAnnounced) -> list[Member]:
        """Who holds a rank that it takes away."""
        members = self.planner.latest.members if self.planner.assignments else ()
        return [m for m in members if event.concerns(m.worker, m.machine)]

    def free(self, event: InterruptionAnnounced | None = None) -> list[str]:
        """Standbys that may get a rank, once `event` stands as well; the oldest first."""
        planner = self.planner
        if event is not None:
            planner = evolve(planner, Recorded(seq=0, time_s=0.0, event=event))
        return [w.worker for w in planner.free]


def outlook(records: Sequence[Recorded]) -> Outlook:
    """Of the newest run in the stream."""
    seen, planner = view(records), State()
    run = seen.submitted.run if seen.submitted else ""
    planned_s = prepared_s = None
    for record in records:
        if record.event.run != run:
            continue
        planner = evolve(planner, record)
        match record.event:
            case MigrationPlanned():
                planned_s = record.time_s
            case MigrationPrepared(unready=unready) if planned_s is not None and not unready:
                prepared_s = record.time_s - planned_s
            case _:
                pass
    return Outlook(seen, planner, prepared_s)


def announced(now: Outlook, event: InterruptionAnnounced, now_s: float) -> Iterator[str]:
    """What will become of an announcement, and when."""
    leaving, free = now.leaving(event), now.free(event)
    by = f" by {clock(event.deadline)}" if event.deadline is not None else ""
    if not leaving:
        what = f"machine {event.machine}" if event.machine else names(event.workers)
        yield f"{event.interruption}: {what} holds no rank, and gets none until it is cancelled"
        return
    ranks = ", ".join(f"rank {m.rank} ({m.worker})" for m in leaving)
    yield f"{event.interruption}: {ranks} {'moves' if len(leaving) == 1 else 'move'}{by}"
    if len(free) < len(leaving):
        needed = "a standby" if len(leaving) == 1 else f"{len(leaving)} standbys"
        yield f"it waits for {needed}; free: {names(free) or 'none'}"
    if event.deadline is not None:
        yield from _in_time(now.prepared_s, event.deadline - now_s)


def _in_time(prepared_s: float | None, left_s: float) -> Iterator[str]:
    if prepared_s is None:
        yield "how long a joiner takes to be prepared is not known yet"
    elif prepared_s > left_s - HASTE_S:
        yield (
            f"the deadline leaves {duration(left_s)}, and the last joiners took"
            f" {duration(prepared_s)} to be prepared: {HASTE_S:g} s before it the ranks stop all"
            " the same, and wait for theirs"
        )


def in_lines(now: Outlook) -> list[str]:
    """A line for each machine that holds no rank since it was drained."""
    return [
        f"  drained   {event.machine} ({event.interruption}, {event.kind}): gets no rank until"
        f" `trainmover undrain {event.machine}`"
        for event in now.planner.interruptions.standing
        if event.machine and not now.leaving(event)
    ]
