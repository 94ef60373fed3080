"""Events in words, for people who read over the job's shoulder."""

import signal

from trainmover.schemas.base import Event
from trainmover.schemas.events import (
    Exit,
    FaultInjected,
    InterruptionAnnounced,
    InterruptionCancelled,
    JobCompleted,
    JobFailed,
    JobStalled,
    JobSubmitted,
    LayoutAssigned,
    MigrationAborted,
    MigrationCompleted,
    MigrationDecided,
    MigrationPlanned,
    MigrationPrepared,
    MigrationSwitched,
    PeerLost,
    PoolExhausted,
    StandbyLost,
    StandbyMismatched,
    StandbyWarmed,
    StepAborted,
    WorkerExited,
    WorkerFailed,
    WorkerRecovered,
    WorkerRegistered,
    WorkerStarted,
    WorkerSuspected,
)

_SHOWN = {c: f"\\x{c:02x}" for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"}
"""Texts come from user code and from whoever announces something."""


def code_in_words(code: int) -> str:
    """`exit code 1`, `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def in_words(event: Event) -> str:
    """One line, without time and subject; what would steer a terminal is shown as an escape."""
    words = _about_job(event) or _about_worker(event) or _about_migration(event) or _fields(event)
    return words.translate(_SHOWN)


def _about_job(event: Event) -> str:
    match event:
        case JobSubmitted():
            return (
                f"layout {event.layout}, on each machine {event.workers_per_machine} to hold ranks"
                f" and {event.num_standbys} to stand by, from {event.host}"
            )
        case LayoutAssigned(members=members):
            return ", ".join(f"rank {m.rank} = {m.worker}" for m in members)
        case JobCompleted():
            return f"{event.completed_steps} steps, state {event.state_digest[:16]}"
        case JobFailed():
            return f"exit code {event.exit_code}: {event.reason}"
        case JobStalled():
            return f"{event.reason}; unblocked by: {event.unblocked_by}"
        case PoolExhausted():
            return f"standbys: {event.needed} needed, {event.free} free"
        case _:
            return ""


def _about_worker(event: Event) -> str:
    match event:
        case WorkerStarted():
            return f"{event.worker} (pid {event.pid}, place {event.local_index})"
        case WorkerExited(exits=exits):
            return ", ".join(f"{_exit(e)}" for e in exits)
        case WorkerRegistered():
            return f"{event.worker} at {', '.join(event.addresses)}"
        case StandbyWarmed():
            how = "by its tape" if event.replayed else "by itself"
            what = event.role_class or f"rank {event.rank}"
            stays = " and stays" if event.resident else ""
            return f"{event.worker} is warm for {what} {how} after {event.warm_s:.1f} s{stays}"
        case StandbyMismatched():
            return f"{event.worker} is cold for {event.role_class}: {event.reason}"
        case StandbyLost():
            return f"{event.worker}: {event.reason}"
        case WorkerFailed() | WorkerSuspected():
            return f"{', '.join(event.workers)}: {event.kind}, {event.evidence}"
        case WorkerRecovered():
            return f"{', '.join(event.workers)}: {event.evidence}"
        case PeerLost():
            return f"{event.worker} lost {event.peer} ({event.channel}): {event.cause}"
        case StepAborted():
            return f"{event.worker} (rank {event.rank}) in step {event.step}: {event.cause}"
        case FaultInjected():
            at = "" if event.step is None else f" in step {event.step}"
            return f"{event.kind} {event.worker}{at}"
        case _:
            return ""


def _exit(one: Exit) -> str:
    error = f", {one.error.exception}: {one.error.message}" if one.error else ""
    return f"{one.worker} {code_in_words(one.code)}{error}"


def _about_migration(event: Event) -> str:
    match event:
        case MigrationPlanned():
            moves = ", ".join(f"rank {r.rank} {r.leaver} -> {r.joiner}" for r in event.replacements)
            return f"generation {event.generation}: {moves or 'same workers'} ({event.reason})"
        case InterruptionAnnounced():
            reason = event.reason or "no reason given"
            who = f"machine {event.machine}" if event.machine else ", ".join(event.workers)
            return f"{event.kind} of {who}: {reason}"
        case InterruptionCancelled():
            return f"{event.interruption}: {event.reason or 'no reason given'}"
        case MigrationPrepared():
            if event.unready:
                late = ", ".join(event.unready)
                return f"generation {event.generation}: {late} not ready, the deadline is near"
            return f"generation {event.generation}: joiners are ready, training goes on"
        case MigrationDecided():
            return f"generation {event.generation}: on from {event.target} committed steps"
        case MigrationSwitched():
            opened = sum(counts[0] for counts in event.links.values())
            return f"generation {event.generation}: {opened} links opened"
        case MigrationCompleted():
            return f"generation {event.generation}: {event.committed} steps committed"
        case MigrationAborted():
            missing = f" (missing: {', '.join(event.missing)})" if event.missing else ""
            return f"generation {event.generation}: {event.reason}{missing}"
        case _:
            return ""


def _fields(event: Event) -> str:
    fields = event.model_dump(exclude={"job", "run"})
    return ", ".join(f"{name}={value}" for name, value in fields.items())
