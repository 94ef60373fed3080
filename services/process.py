"""A service as an operating-system process: arguments, log, signals, exit code."""

import argparse
import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import structlog

from trainmover.bus.job import JobBus
from trainmover.bus.lifeline import die_with
from trainmover.bus.nats import connect
from trainmover.bus.port import BusError, BusUnreachable, NoJetStream
from trainmover.schemas.names import NAME_PATTERN
from trainmover.services import shell
from trainmover.services.contract import Service
from trainmover.telemetry import logs, spans
from trainmover.telemetry.stream import StreamTracer

log = structlog.get_logger()

CONNECT_S = 10.0
BUG, USAGE, UNREACHABLE = 1, 2, 6

EPILOG = """\
environment:
  TRAINMOVER_SECRET      the job's secret, hex; what is not signed with it is ignored
  TRAINMOVER_BUS, TRAINMOVER_JOB, TRAINMOVER_RUN
                         instead of the flags
  TRAINMOVER_PARENT_PID  set by a parent that wants this process to end with it
  OTEL_TRACES_EXPORTER   and other OTEL_* variables: where spans of incidents go

It keeps no state: it reads the job's stream from the start and goes on where it was. Two copies
may run; one decides. Log lines are JSON on standard error.

exit codes: 0 the job is over; 1 a bug (start it again); 2 wrong usage; 6 the bus is not
reachable (start it again); 130 and 143 ended by Ctrl-C and SIGTERM

for instance:
  TRAINMOVER_SECRET=5ec2e7 python -m trainmover.services.{name} \\
      --bus nats://127.0.0.1:4222 --job llama --run r1
"""


def main(name: str, about: str, load: Callable[[], Service[Any]], argv: Sequence[str]) -> int:
    """Run the service that `load` returns until its job is over; the exit code. Blocks."""
    options = _parser(name, about).parse_args(argv)
    try:
        secret = bytes.fromhex(os.environ.get("TRAINMOVER_SECRET", ""))
    except ValueError:
        print("TRAINMOVER_SECRET: expected hexadecimal digits", file=sys.stderr)
        return USAGE
    of = {"job": options.job, "run": options.run}
    try:
        tracer = spans.tracer(name, f"trainmover-{name}", of, os.environ)
    except spans.Unusable as error:
        print(error, file=sys.stderr)
        return USAGE
    stream = StreamTracer(tracer, name)
    subject = logs.configure("info", as_json=True, about={"service": name, **of})
    subject.facts = stream.facts
    if parent := os.environ.get("TRAINMOVER_PARENT_PID"):
        die_with(int(parent))
    try:
        return asyncio.run(_serve(load(), stream, options.bus, options.job, options.run, secret))
    finally:
        tracer.close(spans.FLUSH_S)


def _parser(name: str, about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m trainmover.services.{name}",
        description=about,
        epilog=EPILOG.format(name=name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for flag, meaning, kind in (
        ("bus", "URL of a NATS server with JetStream, nats://[TOKEN@]HOST:PORT", str),
        ("job", "name of the job, its stream and its subjects", _name),
        ("run", "id of this start of the job, as its job.submitted event has it", _name),
    ):
        default = os.environ.get(f"TRAINMOVER_{flag.upper()}")
        parser.add_argument(
            f"--{flag}", help=meaning, type=kind, default=default, required=default is None
        )
    return parser


def _name(text: str) -> str:
    if not re.match(NAME_PATTERN, text):
        raise argparse.ArgumentTypeError(
            f"expected lower-case letters, digits and inner dashes, at most 63, got {text!r}"
        )
    return text


async def _serve(
    service: Service[Any], stream: StreamTracer, url: str, job: str, run: str, secret: bytes
) -> int:
    stop, code = asyncio.Event(), 0

    def end(signum: int) -> None:
        nonlocal code
        code = 128 + signum
        stop.set()

    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, end, signum)
    try:
        nats = await connect(url, job, deadline_s=CONNECT_S)
    except (BusUnreachable, NoJetStream) as error:
        log.error("service.no_bus", error=str(error))
        return UNREACHABLE
    bus = JobBus(nats, job=job, run=run, source=service.name, secret=secret)
    log.info("service.started", pid=os.getpid())
    try:
        await shell.run(service, bus, stream, stop=stop)
    except BusError as error:
        log.error("service.lost_bus", error=str(error))
        return UNREACHABLE
    except Exception:
        log.exception("service.bug")
        return BUG
    finally:
        await bus.close()
    log.info("service.ended", code=code)
    return code
