"""`trainmover services`: detector, planner and mover of a job as children of one process."""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from pathlib import Path

from trainmover.bus.nats import connect, without_secrets
from trainmover.cli import children, flags, reach
from trainmover.cli.options import WrongUsage
from trainmover.cli.submission import past_of
from trainmover.schemas.events import JobSubmitted
from trainmover.telemetry import spans

CONNECT_S = 10.0
LOOK_EVERY_S = 0.5


def add_to(parser: argparse.ArgumentParser) -> None:
    flags.add(parser, "--bus", type=flags.bus_url, metavar="URL", help="NATS server with JetStream")
    flags.add(parser, "--job", type=flags.name, metavar="NAME", help="the job to serve")
    flags.add(
        parser, "--log-dir", type=flags.output_folder, metavar="DIR", help="for <service>.log"
    )
    flags.add(
        parser,
        "--trace-dir",
        type=flags.output_folder,
        metavar="DIR",
        help="for <service>.jsonl, spans",
    )


def services(args: argparse.Namespace) -> int:
    """Blocks until the job is over. Waits for its submission first."""
    if not (args.bus and args.job):
        raise WrongUsage("services need --bus URL and --job NAME")
    if args.trace_dir is not None:
        os.environ.update(spans.into(args.trace_dir, os.environ))
    return asyncio.run(_interruptible(args.bus, args.job, reach.secret(), args.log_dir))


async def _interruptible(url: str, job: str, secret: bytes, log_dir: Path | None) -> int:
    _say(f"services of job {job} on {without_secrets(url)}, until it is over")
    task = asyncio.create_task(_serve(url, job, secret, log_dir))
    came: list[int] = []

    def end(number: int) -> None:
        came.append(number)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, end, number)
    try:
        await task
    except asyncio.CancelledError:
        _say(f"services of job {job} ended by {signal.Signals(came[0]).name}, before it was over")
        return 128 + came[0]
    _say(f"job {job} is over, and its services are")
    return 0


async def _serve(url: str, job: str, secret: bytes, log_dir: Path | None) -> None:
    run = await _submitted(url, job, secret)
    known = children.environment(bus=url, job=job, run=run, secret=secret.hex())
    with tempfile.TemporaryDirectory(prefix="tm-") as temporary:
        folder = log_dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        async with asyncio.TaskGroup() as group:
            for name in children.SERVICES:
                group.create_task(children.supervise(name, known, folder / f"{name}.log"))


async def _submitted(url: str, job: str, secret: bytes) -> str:
    """The run of the newest submission; blocks until there is one. Raises WrongUsage."""
    bus = await connect(url, job, deadline_s=CONNECT_S)
    try:
        while True:
            records = reach.readable(await past_of(bus, job, secret), job).records
            runs = [r.event.run for r in records if isinstance(r.event, JobSubmitted)]
            if runs:
                return runs[-1]
            await asyncio.sleep(LOOK_EVERY_S)
    finally:
        await bus.close()


def _say(text: str) -> None:
    print(f"trainmover: {text}", file=sys.stderr, flush=True)
