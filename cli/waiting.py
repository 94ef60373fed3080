"""What a job waits for before its ranks are assigned, read from the stream alone."""

from collections.abc import Sequence

from trainmover.schemas.base import Event
from trainmover.schemas.events import (
    JobCompleted,
    JobFailed,
    JobSubmitted,
    LayoutAssigned,
    WorkerRegistered,
    WorkerStarted,
)


def waited_for(events: Sequence[Event], bus: str | None) -> str | None:
    """One line for a person; None once ranks are assigned or the job has ended.

    `bus`: URL without its token where services are started by hand, None where they are not.
    """
    if any(isinstance(e, LayoutAssigned | JobCompleted | JobFailed) for e in events):
        return None
    submitted = next((e for e in events if isinstance(e, JobSubmitted)), None)
    if submitted is None:
        return "waiting for the bus: the submission is not read back from it yet"
    world_size = submitted.layout.world_size
    num_machines = world_size // submitted.workers_per_machine
    here = len({e.machine for e in events if isinstance(e, WorkerStarted)})
    if here < num_machines:
        if here == 0:
            return "no worker has started yet: the script's imports are under way"
        which = (
            f"machine {here} of {num_machines} is"
            if here == 1
            else (f"{here} of {num_machines} machines are")
        )
        return f"{which} here; waiting for the other{'s' if num_machines - here > 1 else ''}"
    registered = len({e.worker for e in events if isinstance(e, WorkerRegistered)})
    if registered < world_size:
        return f"{registered} of {world_size} workers have registered; waiting for the others"
    if bus is None:
        return "no service has spoken yet: their logs, with --log-dir, say why"
    return (
        f"no service has spoken yet: is `trainmover services --job {submitted.job} --bus {bus}`"
        " running?"
    )
