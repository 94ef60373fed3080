"""`trainmover status`, `events` and `inject`: looking at a running job, and disturbing it."""

import argparse
import asyncio
import json
from contextlib import aclosing, suppress

from trainmover.agent import requests
from trainmover.bus.job import JobBus
from trainmover.bus.nats import NatsBus
from trainmover.bus.port import BusUnreachable, Message
from trainmover.cli import flags, outlook, reach, session
from trainmover.cli.console import for_reader
from trainmover.cli.incidents import incidents
from trainmover.cli.options import WrongUsage
from trainmover.cli.phrases import clock
from trainmover.cli.progress import numbers, training
from trainmover.cli.submission import past_of
from trainmover.cli.timeline import brief, terminal_width
from trainmover.cli.view import in_lines, view
from trainmover.cli.words import in_words
from trainmover.schemas.base import Event
from trainmover.schemas.envelope import Rejected, open_event
from trainmover.schemas.events import JobCompleted, JobFailed
from trainmover.schemas.local import Beat, Telemetry

AFTER_END_S = 1.0
"""After the job's end its last incident may still be closed, and workers exit."""
LOOK_EVERY_S = 0.5
ANSWER_S = 2.0
TELEMETRY_S = 0.7
"""An agent tells every 0.5 s."""


def add_events(parser: argparse.ArgumentParser) -> None:
    reach.add_to(parser)
    flags.add(parser, "--follow", "-f", action="store_true", help="go on with what happens next")
    flags.add(parser, "--json", action="store_true", help="one JSON object a line")


def add_inject(parser: argparse.ArgumentParser) -> None:
    reach.add_to(parser)
    parser.add_argument("kind", choices=["kill"], help="kill: SIGKILL, as a crash")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--rank", type=flags.natural, metavar="R", help="whoever holds this rank")
    which.add_argument("--worker", type=flags.name, metavar="W", help="by name; also a standby")


def status(args: argparse.Namespace) -> int:
    target = reach.target(args)
    return for_reader(lambda: asyncio.run(_status(target)))


def events(args: argparse.Namespace) -> int:
    target = reach.target(args)
    return for_reader(lambda: asyncio.run(_events(target, follow=args.follow, as_json=args.json)))


def inject(args: argparse.Namespace) -> int:
    return asyncio.run(_inject(reach.target(args), args.rank, args.worker))


async def _status(target: reach.Target) -> int:
    async with reach.connected(target) as bus:
        past = reach.readable(await past_of(bus, target.job, target.secret), target.job)
        now = view(past.records)
        running = now.submitted is not None and now.end is None
        first = await _first(bus, target, now.submitted.run) if now.submitted and running else None
    print("\n".join((*in_lines(now), *outlook.in_lines(outlook.outlook(past.records)))))
    if first is not None:
        print(f"  step {first.committed}{numbers(first)}")
    for incident in incidents(past.records):
        print(brief(incident, terminal_width()))
    return 0


async def _first(bus: NatsBus, target: reach.Target, run: str) -> Beat | None:
    """The beat of a rank in training, if one is told within `TELEMETRY_S`."""
    told: asyncio.Queue[Telemetry] = asyncio.Queue()
    job_bus = JobBus(bus, job=target.job, run=run, source="status", secret=target.secret)
    await job_bus.on_telemetry(told.put)
    with suppress(TimeoutError):
        async with asyncio.timeout(TELEMETRY_S):
            while True:
                beats = training((await told.get()).workers)
                if beats:
                    return max(beats, key=lambda beat: beat.committed)
    return None


async def _events(target: reach.Target, *, follow: bool, as_json: bool) -> int:
    async with reach.connected(target) as bus:
        if follow:
            await _follow(bus, target, as_json=as_json)
            return 0
        last = await bus.last_seq()
        if last == 0:
            return 0
        async with aclosing(bus.follow(0)) as messages:
            async for message in messages:
                print(_line(message, _event(message, target), as_json=as_json), flush=True)
                if message.seq >= last:
                    break
    return 0


async def _follow(bus: NatsBus, target: reach.Target, *, as_json: bool) -> None:
    """Until the job has ended. Raises BusUnreachable when its bus went away with its `run`."""
    following = asyncio.create_task(_to_the_end(bus, target, as_json=as_json))
    going = asyncio.create_task(gone(bus, target))
    try:
        await asyncio.wait((following, going), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((following,), timeout=2 * AFTER_END_S)  # the end may just have come
        if not following.done():
            raise BusUnreachable(
                f"`trainmover run` of job {target.job} is gone, and its bus with it, before the"
                " end of the job was told"
            )
        await following
    finally:
        following.cancel()
        going.cancel()


async def _to_the_end(bus: NatsBus, target: reach.Target, *, as_json: bool) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(None) as limit, aclosing(bus.follow(0)) as messages:
            async for message in messages:
                event = _event(message, target)
                print(_line(message, event, as_json=as_json), flush=True)
                if isinstance(event, JobCompleted | JobFailed):
                    limit.reschedule(asyncio.get_running_loop().time() + AFTER_END_S)


async def gone(bus: NatsBus, target: reach.Target) -> None:
    """Blocks as long as the job's `run` lives here or its bus answers; for ever with --bus."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        if not target.from_session or target.job in session.live():
            continue
        try:
            async with asyncio.timeout(ANSWER_S):
                await bus.last_seq()
        except TimeoutError:
            return


def _event(message: Message, target: reach.Target) -> Event | Rejected:
    try:
        return open_event(
            message.subject,
            message.payload,
            message.headers,
            job=target.job,
            secret=target.secret,
        )
    except Rejected as error:
        return error


def _line(message: Message, event: Event | Rejected, *, as_json: bool) -> str:
    """One event. What is no acceptable event is shown as such: somebody put it there."""
    _, _, kind = message.subject.split(".", 2)
    at = clock(message.time_s, "milliseconds")
    if isinstance(event, Rejected):
        rejected = {"seq": message.seq, "type": kind, "rejected": str(event)}
        return json.dumps(rejected) if as_json else f"{at}  {kind:<24} REJECTED: {event}"
    if as_json:
        envelope = {"seq": message.seq, "time_s": message.time_s, "type": event.TYPE}
        return json.dumps({**envelope, **event.model_dump(mode="json")})
    return f"{at}  {event.TYPE:<20} {in_words(event)}"


async def _inject(target: reach.Target, rank: int | None, worker: str | None) -> int:
    async with reach.connected(target) as bus:
        past = reach.readable(await past_of(bus, target.job, target.secret), target.job)
        now = view(past.records)
        if now.submitted is None:
            raise WrongUsage(f"no job {target.job} was submitted on this bus")
        try:
            chosen = worker or now.worker_of(rank or 0)
        except ValueError as error:
            raise WrongUsage(str(error)) from error
        if chosen not in now.machines:
            alive = ", ".join(sorted(now.machines)) or "none"
            raise WrongUsage(f"worker {chosen} is not alive; alive: {alive}")
        return await _kill(
            bus, target, now.submitted.run, chosen, now.machines[chosen], now.rank_of(chosen)
        )


async def _kill(
    bus: NatsBus, target: reach.Target, run: str, worker: str, machine: str, rank: int | None
) -> int:
    request = requests.Kill(run=run, worker=worker, rank=rank)
    done = await requests.ask(bus, request, job=target.job, machine=machine, secret=target.secret)
    if done.refused:
        raise WrongUsage(done.refused)
    print(f"killed {worker}" + ("" if rank is None else f" (rank {rank})"))
    return 0
