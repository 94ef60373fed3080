"""Reaching a job from another terminal: by its session file, or by --bus, --job and the secret."""

import argparse
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from trainmover.bus.nats import NatsBus, connect
from trainmover.cli import flags, session
from trainmover.cli.options import WrongUsage, secret_in_hex
from trainmover.cli.submission import Past

CONNECT_S = 5.0


@dataclass(frozen=True, slots=True)
class Target:
    url: str = field(repr=False)
    job: str
    secret: bytes = field(repr=False)
    from_session: bool = False
    """Of a `run` on this machine, which may have the bus inside it."""


def add_to(parser: argparse.ArgumentParser) -> None:
    flags.add(
        parser,
        "--job",
        type=flags.name,
        metavar="NAME",
        help="default: the only job that runs on this machine",
    )
    flags.add(
        parser,
        "--bus",
        type=flags.bus_url,
        metavar="URL",
        help="where the job's bus is, if it was not started on this machine; the secret is read"
        " from TRAINMOVER_SECRET",
    )


def target(args: argparse.Namespace) -> Target:
    """Raises WrongUsage that says which jobs there are."""
    if args.bus:
        if not args.job:
            raise WrongUsage("--bus needs --job NAME")
        return Target(args.bus, args.job, secret())
    sessions = session.live()
    names = ", ".join(sessions) or "none"
    if args.job is None and len(sessions) != 1:
        raise WrongUsage(f"which job? give --job NAME; jobs on this machine: {names}")
    found = sessions.get(args.job or next(iter(sessions)))
    if found is None:
        raise WrongUsage(
            f"job {args.job} does not run on this machine (jobs that do: {names}); for another"
            " machine's give --bus URL and set TRAINMOVER_SECRET"
        )
    return Target(found.url, found.job, bytes.fromhex(found.secret), from_session=True)


def secret() -> bytes:
    """Of the environment, empty when it is not set. Raises WrongUsage."""
    return bytes.fromhex(secret_in_hex(os.environ.get("TRAINMOVER_SECRET")))


def readable(past: Past, job: str) -> Past:
    """`past`, unless another secret hides all of it. Raises WrongUsage then."""
    if past.num_foreign and not past.records:
        raise WrongUsage(
            f"the events of job {job} on this bus are signed with another secret: set"
            " TRAINMOVER_SECRET to that of the job"
        )
    return past


@contextlib.asynccontextmanager
async def connected(target: Target) -> AsyncIterator[NatsBus]:
    """Raises bus.port.BusUnreachable or NoJetStream."""
    bus = await connect(target.url, target.job, deadline_s=CONNECT_S)
    try:
        yield bus
    finally:
        await bus.close()
