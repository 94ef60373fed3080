"""Notices of preemption: they take workers or machines from a job, or they are its end."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from trainmover.schemas.events import InterruptionAnnounced
from trainmover.schemas.interruptions import Interruptions
from trainmover.schemas.member import Member

TOGETHER_S = 2.0
"""Notices so close together come from one decision of whoever runs the machines."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A preemption, and when the stream heard of it."""

    event: InterruptionAnnounced
    time_s: float


def end_of_job(
    notices: Sequence[Notice],
    interruptions: Interruptions,
    members: Sequence[Member],
    standbys: Collection[tuple[str, str]],
) -> str:
    """Why the last notice is the end of the job; empty while standbys can take over.

    `standbys`: (worker, machine) of all that live or start and hold no rank. The job ends when
    nothing would be left of it, or when the notices of the last `TOGETHER_S` take more ranks than
    there are standbys: whoever ends a job tells all of it.
    """
    last = notices[-1]
    machines = {machine for _, machine in standbys} | {m.machine for m in members}
    if last.event.machine and all(interruptions.drains(m) for m in machines):
        return "every machine of the job is told to go"
    together = [n.event for n in notices if last.time_s - n.time_s <= TOGETHER_S]
    leaving = [m for m in members if any(e.concerns(m.worker, m.machine) for e in together)]
    staying = [one for one in standbys if not interruptions.of(*one)]
    if len(leaving) <= len(staying):
        return ""
    standby = "standby is" if len(staying) == 1 else "standbys are"
    ranks = f"{len(leaving)} rank{'s are' if len(leaving) > 1 else ' is'}"
    return f"{ranks} told to go at once, and {len(staying) or 'no'} {standby} left"
