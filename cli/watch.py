"""`trainmover status`, `events` and `inject`: looking at a running job, and disturbing it."""

import argparse
import asyncio
import json
from contextlib import aclosing
from datetime import UTC, datetime

from trainmover.agent import requests
from trainmover.bus.nats import NatsBus
from trainmover.bus.port import Message
from trainmover.cli import flags, reach
from trainmover.cli.incidents import incidents, timeline
from trainmover.cli.options import WrongUsage
from trainmover.cli.submission import past_of
from trainmover.cli.view import in_lines, view
from trainmover.cli.words import in_words
from trainmover.schemas.envelope import Rejected, open_event


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
    return asyncio.run(_status(reach.target(args)))


def events(args: argparse.Namespace) -> int:
    return asyncio.run(_events(reach.target(args), follow=args.follow, as_json=args.json))


def inject(args: argparse.Namespace) -> int:
    return asyncio.run(_inject(reach.target(args), args.rank, args.worker))


async def _status(target: reach.Target) -> int:
    async with reach.connected(target) as bus:
        records = (await past_of(bus, target.job, target.secret)).records
    print("\n".join(in_lines(view(records))))
    for incident in incidents(records):
        print(timeline(incident))
    return 0


async def _events(target: reach.Target, *, follow: bool, as_json: bool) -> int:
    async with reach.connected(target) as bus:
        last = await bus.last_seq()
        if last == 0 and not follow:
            return 0
        async with aclosing(bus.follow(0)) as messages:
            async for message in messages:
                print(_line(message, target, as_json=as_json), flush=True)
                if not follow and message.seq >= last:
                    break
    return 0


def _line(message: Message, target: reach.Target, *, as_json: bool) -> str:
    """One event. What is no acceptable event is shown as such: somebody put it there."""
    _, _, kind = message.subject.split(".", 2)
    at = _clock(message.time_s)
    try:
        event = open_event(
            message.subject,
            message.payload,
            message.headers,
            job=target.job,
            secret=target.secret,
        )
    except Rejected as error:
        rejected = {"seq": message.seq, "type": kind, "rejected": str(error)}
        return json.dumps(rejected) if as_json else f"{at}  {kind:<24} REJECTED: {error}"
    if as_json:
        envelope = {"seq": message.seq, "time_s": message.time_s, "type": event.TYPE}
        return json.dumps({**envelope, **event.model_dump(mode="json")})
    return f"{at}  {event.TYPE:<20} {in_words(event)}"


def _clock(time_s: float) -> str:
    """Local time of day."""
    return datetime.fromtimestamp(time_s, UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]


async def _inject(target: reach.Target, rank: int | None, worker: str | None) -> int:
    async with reach.connected(target) as bus:
        now = view((await past_of(bus, target.job, target.secret)).records)
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
