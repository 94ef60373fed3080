"""`trainmover migrate` and `drain`: give ranks of a running job to standbys, without a fault."""

import argparse
import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

from trainmover.bus.job import JobBus
from trainmover.cli import flags, reach, watch
from trainmover.cli.options import LOOPBACK, WrongUsage
from trainmover.cli.outlook import Outlook, announced, outlook
from trainmover.cli.phrases import names
from trainmover.cli.submission import past_of
from trainmover.cli.words import in_words
from trainmover.schemas.events import (
    InterruptionAnnounced,
    InterruptionCancelled,
    JobCompleted,
    JobFailed,
    MigrationAborted,
    MigrationCompleted,
    MigrationDecided,
    MigrationPlanned,
    MigrationPrepared,
    MigrationSwitched,
    PoolExhausted,
)
from trainmover.services.planner.moves import MAX_TRIES

MOVED, NOT_MOVED = 0, 1
TIMEOUT_S = 900.0
TOLD = (
    InterruptionCancelled,
    MigrationPlanned,
    MigrationPrepared,
    MigrationDecided,
    MigrationSwitched,
    MigrationCompleted,
    MigrationAborted,
    PoolExhausted,
    JobCompleted,
    JobFailed,
)
MIGRATE_EXAMPLE = """\
examples:
  trainmover migrate --rank 1 --reason 'fan of m7 is loud'
  trainmover migrate --rank 0 --to m8-w4 --rank 1 --to m9-w4    # both in one switch

training goes on until the standby is ready; all ranks stop at the end of one step, the worker
hands its state over and exits, and training goes on: no step is done twice
"""
DRAIN_EXAMPLE = """\
examples:
  trainmover drain m7 --deadline 10m --reason 'new firmware'    # all its ranks, and no new ones
  trainmover drain m7-w2                                        # one worker
  trainmover undrain m7                                         # it may hold ranks again

as with migrate no step is done twice. The machine is given no rank until `undrain`, by no crash
either; end its agent (Ctrl-C, SIGTERM) when drain has ended with 0. SIGTERM to an agent drains its
machine by itself, within its --grace
"""

Announce = Callable[[Outlook], InterruptionAnnounced]


def add_migrate(parser: argparse.ArgumentParser) -> None:
    reach.add_to(parser)
    parser.add_argument(
        "--rank",
        type=flags.natural,
        metavar="R",
        dest="moves",
        action=_Rank,
        required=True,
        help="move this rank to a standby; give it again for more ranks, they move as one",
    )
    parser.add_argument(
        "--to",
        type=flags.name,
        metavar="W",
        dest="moves",
        action=_To,
        default=argparse.SUPPRESS,
        help="to this standby, of the --rank before it (default: the planner chooses)",
    )
    _add_reason_and_timeout(parser)


def add_drain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        type=flags.name,
        metavar="MACHINE|WORKER",
        help="a machine with all its ranks, or one worker",
    )
    reach.add_to(parser)
    flags.add(
        parser,
        "--deadline",
        type=flags.duration,
        metavar="TIME",
        help="it is gone after that, as 90s, 10m or 2h: ranks stop in time, prepared or not",
    )
    _add_reason_and_timeout(parser)


def _add_reason_and_timeout(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, "--reason", default="", metavar="TEXT", help="stands in events and reports")
    flags.add(
        parser,
        "--timeout",
        type=flags.seconds,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help=f"how long to watch it (default {TIMEOUT_S:g}); it goes on without a watcher",
    )


class _Rank(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, value: Any, *_: Any) -> None:
        namespace.moves = [*(namespace.moves or ()), (value, None)]


class _To(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, value: Any, *_: Any) -> None:
        *before, (rank, to) = namespace.moves or [(None, None)]
        if rank is None or to is not None:
            parser.error("--to W stands behind the --rank R that it is for")
        namespace.moves = [*before, (rank, value)]


def migrate(args: argparse.Namespace) -> int:
    """The exit code; blocks until the ranks have moved, or cannot."""
    moves = dict(args.moves)

    def announce(now: Outlook) -> InterruptionAnnounced:
        return migration(now, moves, args.reason)

    return asyncio.run(_announce(reach.target(args), announce, args.timeout))


def drain(args: argparse.Namespace) -> int:
    """The exit code; blocks until what is drained holds no rank, or cannot be."""

    def announce(now: Outlook) -> InterruptionAnnounced:
        deadline = None if args.deadline is None else time.time() + args.deadline
        return maintenance(now, args.what, deadline, args.reason)

    return asyncio.run(_announce(reach.target(args), announce, args.timeout))


def migration(now: Outlook, moves: Mapping[int, str | None], reason: str) -> InterruptionAnnounced:
    """Of ranks, each to the standby that is named for it. Raises WrongUsage."""
    try:
        workers = {rank: now.view.worker_of(rank) for rank in sorted(moves)}
    except ValueError as error:
        raise WrongUsage(str(error)) from error
    joiners = {workers[rank]: to for rank, to in moves.items() if to is not None}
    free = now.free()
    for rank, to in moves.items():
        if to is not None and (to not in free or list(joiners.values()).count(to) > 1):
            raise WrongUsage(
                f"--rank {rank} --to {to}: {to} is no free standby; free: {names(free) or 'none'}"
            )
    given = {"workers": tuple(workers.values()), "joiners": joiners, "reason": reason}
    return _announcement(now, "move", kind="rebalance", **given)


def maintenance(
    now: Outlook, what: str, deadline: float | None, reason: str
) -> InterruptionAnnounced:
    """Of a worker, or a machine. Raises WrongUsage that says which there are."""
    live, machines = now.view.machines, set(now.view.machines.values())
    given: dict[str, Any] = {"deadline": deadline, "reason": reason}
    if what in machines:
        return _announcement(now, "drain", kind="maintenance", machine=what, **given)
    if what in live:
        return _announcement(now, "drain", kind="maintenance", workers=(what,), **given)
    raise WrongUsage(
        f"no machine and no live worker is named {what}; machines: {names(sorted(machines))};"
        f" workers: {names(sorted(live))}"
    )


def _announcement(now: Outlook, name: str, **given: Any) -> InterruptionAnnounced:
    submitted = now.view.submitted
    assert submitted is not None
    return InterruptionAnnounced(
        job=submitted.job,
        run=submitted.run,
        interruption=f"{name}-{secrets.token_hex(4)}",
        **given,
    )


async def _announce(target: reach.Target, announce: Announce, timeout_s: float) -> int:
    async with reach.connected(target) as bus:
        now, last = await running(bus, target)
        event = announce(now)
        for line in (*notes(now, event, target), *announced(now, event, time.time())):
            print(line, flush=True)
        job_bus = JobBus(bus, job=target.job, run=event.run, source="cli", secret=target.secret)
        await job_bus.publish(event)
        leaving = {m.worker for m in now.leaving(event)}
        if not leaving:
            return MOVED
        watching = asyncio.create_task(_watch(job_bus, last, event.interruption, leaving))
        going = asyncio.create_task(watch.gone(bus, target))
        try:
            both = (watching, going)
            await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                return watching.result()
        finally:
            watching.cancel()
            going.cancel()
        why = f"`trainmover run` of job {target.job} is gone"
        if not going.done():
            why = f"not over after {timeout_s:g} s; `trainmover events --follow` shows the rest"
        print(why)
        return NOT_MOVED


async def running(bus: Any, target: reach.Target) -> tuple[Outlook, int]:
    """A job that runs, and the seq of the newest event. Raises WrongUsage."""
    past = reach.readable(await past_of(bus, target.job, target.secret), target.job)
    now = outlook(past.records)
    if now.view.submitted is None or now.view.end is not None:
        raise WrongUsage(f"job {target.job} does not run: there is nothing to move")
    return now, past.records[-1].seq


def notes(now: Outlook, event: InterruptionAnnounced, target: reach.Target) -> Iterable[str]:
    """What else is on the machine that is to go."""
    machine = event.machine
    if machine is None:
        return
    only = set(now.view.machines.values()) == {machine}
    if target.from_session and only:
        yield (
            f"note: {machine} runs the bus and the services of this job too, and no other machine"
            " belongs to it: its ranks have nowhere to go"
        )
        return
    there = {
        address.split(":")[1]
        for worker in now.planner.registered.values()
        if worker.machine == machine
        for address in worker.addresses
        if address.startswith("tcp:")
    }
    host = urlsplit(target.url).hostname or ""
    if host in there - set(LOOPBACK) or host == machine:
        yield f"note: {machine} runs the bus: recovery stops when it goes, training does not"
    submitted = now.view.submitted
    if submitted is not None and submitted.host == machine:
        yield f"note: the job was submitted on {machine}; if its services run there, they go too"


async def _watch(bus: JobBus, after: int, interruption: str, leavers: set[str]) -> int:
    """Tells of the plans until `leavers` hold no rank any more, by a move or since they died."""
    members: dict[int, set[str]] = {}
    tries: set[int] = set()
    async with aclosing(bus.follow(after)) as records:
        async for record in records:
            event = record.event
            if not isinstance(event, TOLD):
                continue
            print(f"{event.TYPE:<20} {in_words(event)}", flush=True)
            match event:
                case MigrationPlanned():
                    members[event.generation] = {m.worker for m in event.members}
                    if event.kind == "planned" and leavers & {m.worker for m in event.leavers}:
                        tries.add(event.generation)
                case MigrationCompleted() if not leavers & members.get(event.generation, leavers):
                    return MOVED
                case MigrationAborted() if event.generation in tries and len(tries) == MAX_TRIES:
                    print("given up: the ranks stay where they are")
                    return NOT_MOVED
                case InterruptionCancelled() if event.interruption == interruption:
                    return NOT_MOVED
                case JobCompleted() | JobFailed():
                    return NOT_MOVED
                case _:
                    pass
    return NOT_MOVED
