"""The state of a job as its stream tells it: who holds which rank, who stands by, what is wrong."""

from collections.abc import Sequence
from dataclasses import dataclass

from trainmover.cli.pending import Pending, pending
from trainmover.schemas.events import (
    JobCompleted,
    JobFailed,
    JobStalled,
    JobSubmitted,
    LayoutAssigned,
    MigrationAborted,
    MigrationDecided,
    MigrationPlanned,
    StandbyWarmed,
    WorkerExited,
    WorkerStarted,
)
from trainmover.schemas.member import Member
from trainmover.schemas.recorded import Recorded


@dataclass(frozen=True, slots=True)
class View:
    submitted: JobSubmitted | None
    generation: int
    members: tuple[Member, ...]
    """Of the newest assignment in force, in rank order."""
    machines: dict[str, str]
    """Live worker -> machine."""
    pids: dict[str, int]
    """Live worker -> its process there."""
    warm: frozenset[str]
    """Live workers without a rank that are warmed up."""
    former: frozenset[str]
    """Workers that held a rank in an older assignment: no standbys, they are about to end."""
    end: JobCompleted | JobFailed | None
    stalled: JobStalled | None
    """Unless a newer plan or the end resolved it."""
    pending: tuple[Pending, ...]
    """Moves that were asked for and are not decided."""

    def worker_of(self, rank: int) -> str:
        """Raises ValueError that says which ranks there are."""
        if not self.members:
            raise ValueError(
                f"no rank {rank} yet: ranks are not assigned before all have registered"
            )
        for member in self.members:
            if member.rank == rank:
                return member.worker
        raise ValueError(f"no rank {rank}: the job has {len(self.members)} ranks now, from 0")

    def rank_of(self, worker: str) -> int | None:
        return next((m.rank for m in self.members if m.worker == worker), None)


def view(records: Sequence[Recorded]) -> View:
    """Of the newest run in the stream."""
    submissions = [r.event for r in records if isinstance(r.event, JobSubmitted)]
    run = submissions[-1].run if submissions else ""
    events = [r.event for r in records if r.event.run == run]
    decided = set[int]()
    aborted = set[int]()
    for event in events:  # of both, which a doubled mover can say, the first counts
        match event:
            case MigrationDecided(generation=g) if g not in aborted:
                decided.add(g)
            case MigrationAborted(generation=g):
                aborted.add(g)
            case _:
                pass
    plans = [
        e
        for e in events
        if isinstance(e, LayoutAssigned)
        or (isinstance(e, MigrationPlanned) and (e.kind != "planned" or e.generation in decided))
    ]
    newest = max(plans, key=lambda plan: plan.generation, default=None)
    members = newest.members if newest is not None else ()
    exited = {x.worker for e in events if isinstance(e, WorkerExited) for x in e.exits}
    alive = [e for e in events if isinstance(e, WorkerStarted) and e.worker not in exited]
    machines = {e.worker: e.machine for e in alive}
    holders = {member.worker for member in members}
    warm = {
        e.worker for e in events if isinstance(e, StandbyWarmed) and e.resident
    } & machines.keys() - holders
    ends = [e for e in events if isinstance(e, JobCompleted | JobFailed)]
    stalls = [
        e
        for e in events
        if isinstance(e, JobStalled) and newest is not None and e.generation == newest.generation
    ]
    return View(
        submitted=submissions[-1] if submissions else None,
        generation=newest.generation if newest is not None else 0,
        members=tuple(sorted(members, key=lambda member: member.rank)),
        machines=machines,
        pids={e.worker: e.pid for e in alive},
        warm=frozenset(warm),
        former=frozenset(m.worker for plan in plans for m in plan.members) - holders,
        end=ends[0] if ends else None,
        stalled=stalls[-1] if stalls and not ends else None,
        pending=pending([r for r in records if r.event.run == run]),
    )


def in_lines(view: View) -> list[str]:
    """For people: one line a rank, one for the standbys, one for what is wrong."""
    if view.submitted is None:
        return ["no job was submitted under this name"]
    submitted = view.submitted
    lines = [
        f"job {submitted.job}, run {submitted.run}, layout {submitted.layout},"
        f" generation {view.generation}"
    ]
    for member in view.members:
        pid = view.pids.get(member.worker)
        here = "  (gone)" if pid is None else f", pid {pid}"
        lines.append(f"  rank {member.rank:<4} {member.worker} on {member.machine}{here}")
    holders = {member.worker for member in view.members}
    spare = sorted(view.machines.keys() - holders - view.former)
    states = (
        f"{w} ({'warm' if w in view.warm else 'warming up'}, pid {view.pids[w]})" for w in spare
    )
    lines.append(f"  standbys  {', '.join(states) or 'none'}")
    lines += [f"  moving    {each.in_words()}" for each in view.pending]
    if view.stalled is not None:
        lines.append(f"  stalled: {view.stalled.reason}; {view.stalled.unblocked_by}")
    match view.end:
        case JobCompleted():
            lines.append(f"  completed: {view.end.completed_steps} steps")
        case JobFailed():
            lines.append(f"  failed ({view.end.exit_code}): {view.end.reason}")
        case None:
            pass
    return lines
