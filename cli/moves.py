"""`trainmover migrate`: give ranks of a running job to standbys, without a fault."""

import argparse
import asyncio
import secrets
from collections.abc import Collection
from contextlib import aclosing

from trainmover.bus.job import JobBus
from trainmover.cli import flags, reach, watch
from trainmover.cli.options import WrongUsage
from trainmover.cli.submission import past_of
from trainmover.cli.view import View, view
from trainmover.cli.words import in_words
from trainmover.schemas.events import (
    InterruptionAnnounced,
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
from trainmover.services.planner.decide import MAX_TRIES

MOVED, NOT_MOVED = 0, 1
TIMEOUT_S = 900.0
TOLD = (
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
EXAMPLE = """\
example:
  trainmover migrate --rank 1 --reason 'fan of m7 is loud'

training goes on until the standby is ready; all ranks stop at the end of one step, the worker
hands its state over and exits, and training goes on: no step is done twice
"""


def add_to(parser: argparse.ArgumentParser) -> None:
    reach.add_to(parser)
    parser.add_argument(
        "--rank",
        type=flags.natural,
        metavar="R",
        action="append",
        required=True,
        help="move this rank to a standby; give it again for more ranks, they move as one",
    )
    flags.add(parser, "--reason", default="", metavar="TEXT", help="stands in events and reports")
    flags.add(
        parser,
        "--timeout",
        type=flags.seconds,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help=f"how long to watch it (default {TIMEOUT_S:g}); it goes on without a watcher",
    )


def migrate(args: argparse.Namespace) -> int:
    """The exit code; blocks until the ranks have moved, or cannot."""
    return asyncio.run(_migrate(reach.target(args), args.rank, args.reason, args.timeout))


async def _migrate(
    target: reach.Target, ranks: Collection[int], reason: str, timeout_s: float
) -> int:
    async with reach.connected(target) as bus:
        past = reach.readable(await past_of(bus, target.job, target.secret), target.job)
        event = _announcement(view(past.records), target.job, ranks, reason)
        last = await bus.last_seq()
        job_bus = JobBus(bus, job=target.job, run=event.run, source="cli", secret=target.secret)
        await job_bus.publish(event)
        names, one = ", ".join(event.workers), len(event.workers) == 1
        what = "gives its rank to a standby" if one else "give their ranks to standbys"
        print(f"announced: {names} {what}", flush=True)
        watching = asyncio.create_task(_watch(job_bus, last, set(event.workers)))
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


def _announcement(
    now: View, job: str, ranks: Collection[int], reason: str
) -> InterruptionAnnounced:
    if now.submitted is None or now.end is not None:
        raise WrongUsage(f"job {job} does not run: there is nothing to move")
    try:
        workers = tuple(now.worker_of(rank) for rank in sorted(set(ranks)))
    except ValueError as error:
        raise WrongUsage(str(error)) from error
    return InterruptionAnnounced(
        job=job,
        run=now.submitted.run,
        interruption=f"move-{secrets.token_hex(4)}",
        kind="rebalance",
        workers=workers,
        reason=reason,
    )


async def _watch(bus: JobBus, after: int, leavers: set[str]) -> int:
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
                case JobCompleted() | JobFailed():
                    return NOT_MOVED
                case _:
                    pass
    return NOT_MOVED
