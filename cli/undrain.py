"""`trainmover undrain` and `cancel`: take back what was announced."""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress

from trainmover.bus.job import JobBus
from trainmover.cli import flags, reach
from trainmover.cli.moves import running
from trainmover.cli.options import WrongUsage
from trainmover.cli.outlook import Outlook
from trainmover.cli.phrases import names
from trainmover.schemas.events import (
    InterruptionAnnounced,
    InterruptionCancelled,
    MigrationAborted,
    MigrationDecided,
)
from trainmover.services.planner.state import Phase

CANCELLED, TOO_LATE = 0, 1
SETTLE_S = 10.0
UNDRAIN_EXAMPLE = """\
example:
  trainmover undrain m7

a move that is under way is given up, unless it is decided: then it goes on
"""
CANCEL_EXAMPLE = """\
example:
  trainmover cancel move-1a2b3c4d     # by the name that drain, migrate and status tell

up to migration.decided the ranks stay where they are; after it the move goes on
"""


def add_undrain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", type=flags.name, metavar="MACHINE|WORKER", help="that was drained, or was to move"
    )
    _add(parser)


def add_cancel(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", type=flags.name, metavar="INTERRUPTION", help="its name, as move-1a2b3c4d"
    )
    _add(parser)


def _add(parser: argparse.ArgumentParser) -> None:
    reach.add_to(parser)
    flags.add(parser, "--reason", default="", metavar="TEXT", help="stands in events")


def undrain(args: argparse.Namespace) -> int:
    """The exit code; blocks until a move under way is given up, or goes on."""
    return asyncio.run(_cancel(reach.target(args), args.what, args.reason, named=False))


def cancel(args: argparse.Namespace) -> int:
    """As `undrain`, of one interruption."""
    return asyncio.run(_cancel(reach.target(args), args.what, args.reason, named=True))


def chosen(now: Outlook, what: str, *, named: bool) -> Sequence[InterruptionAnnounced]:
    """The interruptions that stand of a machine or worker, or by name. Raises WrongUsage."""
    stands = now.planner.interruptions.standing
    found = [
        event
        for event in stands
        if (event.interruption == what if named else what in (event.machine, *event.workers))
    ]
    if not found:
        told = [i.interruption if named else i.machine or names(i.workers) for i in stands]
        raise WrongUsage(
            f"{'no interruption is named' if named else 'nothing drains'} {what};"
            f" what stands: {names(told) or 'none'}"
        )
    return found


async def _cancel(target: reach.Target, what: str, reason: str, *, named: bool) -> int:
    async with reach.connected(target) as bus:
        now, last = await running(bus, target)
        events, planner = chosen(now, what, named=named), now.planner
        run = events[0].run
        job_bus = JobBus(bus, job=target.job, run=run, source="cli", secret=target.secret)
        for event in events:
            cancelled = InterruptionCancelled(
                job=target.job, run=run, interruption=event.interruption, reason=reason
            )
            await job_bus.publish(cancelled)
            print(f"cancelled: {event.interruption} ({event.kind} of {_who(event)})", flush=True)
        moving = planner.pending or (planner.latest if planner.assignments else None)
        concerned = moving is not None and any(
            event.concerns(m.worker, m.machine) for event in events for m in moving.leavers
        )
        if moving is None or not concerned or moving.phase is Phase.RUNNING:
            return CANCELLED
        if planner.pending is None:
            return _too_late(moving.generation)
        return await _outcome(job_bus, last, moving.generation)


async def _outcome(bus: JobBus, after: int, generation: int) -> int:
    with suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_S), aclosing(bus.follow(after)) as records:
            async for record in records:
                match record.event:
                    case MigrationAborted(generation=g) if g == generation:
                        print("the ranks stay where they are")
                        return CANCELLED
                    case MigrationDecided(generation=g) if g == generation:
                        return _too_late(generation)
                    case _:
                        pass
    print(f"generation {generation} is neither given up nor decided after {SETTLE_S:g} s")
    return TOO_LATE


def _too_late(generation: int) -> int:
    print(f"too late: generation {generation} is decided and goes on")
    return TOO_LATE


def _who(event: InterruptionAnnounced) -> str:
    return event.machine or names(event.workers)
