"""The `trainmover` command."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import structlog

from trainmover.bus.port import BusError
from trainmover.cli import (
    children,
    flags,
    moves,
    options,
    reach,
    rehearse,
    reporting,
    run,
    services,
    undrain,
    watch,
)
from trainmover.schemas.envelope import Rejected

Command = Callable[[argparse.Namespace], int]

ABOUT = """\
Keeps a distributed PyTorch job training when a worker dies: a standby takes over its rank,
the others keep their processes, memory and connections, and training goes on bit for bit.
"""
EPILOG = """\
a first job:
  trainmover run --nproc-per-node 2 --standbys 1 train.py

from another terminal:
  trainmover status
  trainmover inject kill --rank 1
  trainmover migrate --rank 0
  trainmover drain m7 --deadline 10m
  trainmover events --follow
  trainmover report --html report.html

before a long job, with kills, on a few steps:
  trainmover rehearse train.py

every flag is an environment variable too, as it says; `-` and `_` are both accepted in flags
"""


def parser() -> argparse.ArgumentParser:
    root = flags.Parser(
        prog="trainmover",
        description=ABOUT,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = root.add_subparsers(metavar="COMMAND", required=True)

    def add(
        name: str,
        command: Command,
        about: str,
        add_flags: Callable[[argparse.ArgumentParser], None],
        epilog: str | None = None,
    ) -> None:
        sub = commands.add_parser(
            name,
            help=about,
            description=about,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add_flags(sub)
        sub.set_defaults(command=command)

    add("run", _run, "run a job, or join one on a bus", options.add_to, options.EXAMPLE)
    add(
        "rehearse",
        _rehearse,
        "run a script undisturbed twice and once with kills, and compare the bits",
        rehearse.add_to,
        rehearse.EXAMPLE,
    )
    add("status", watch.status, "ranks, standbys and incidents of a job", reach.add_to)
    add("events", watch.events, "what happened in a job, in words or JSON", watch.add_events)
    add(
        "report",
        reporting.tell,
        "a job and its incidents as text, JSON, page or picture",
        reporting.add_to,
        reporting.EXAMPLE,
    )
    add(
        "inject",
        watch.inject,
        "disturb a running job, to see it recover",
        watch.add_inject,
        "example:\n  trainmover inject kill --rank 1\n",
    )
    add(
        "migrate",
        moves.migrate,
        "move ranks of a running job to standbys, without a fault",
        moves.add_migrate,
        moves.MIGRATE_EXAMPLE,
    )
    add(
        "drain",
        moves.drain,
        "take all ranks from a machine, or the one of a worker, before it goes",
        moves.add_drain,
        moves.DRAIN_EXAMPLE,
    )
    add(
        "undrain",
        undrain.undrain,
        "a drained machine or worker may hold ranks again",
        undrain.add_undrain,
        undrain.UNDRAIN_EXAMPLE,
    )
    add(
        "cancel",
        undrain.cancel,
        "take back one drain or migrate by its name",
        undrain.add_cancel,
        undrain.CANCEL_EXAMPLE,
    )
    add(
        "services",
        services.services,
        "detector, planner and mover of a job on a bus",
        services.add_to,
        "example:\n  trainmover services --bus nats://host:4222 --job llama\n",
    )
    for name in children.SERVICES:
        commands.add_parser(name, help=f"the {name} alone: trainmover {name} --help")
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code; blocks until the command is done."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given and given[0] in children.SERVICES:
        service = importlib.import_module(f"trainmover.services.{given[0]}.__main__")
        return int(service.main(given[1:]))
    args = parser().parse_args(given)
    command: Command = args.command
    own = command in (_run, _rehearse, services.services)
    _log_to_stderr("warning" if own else "error")  # a watched job's bus may come and go
    try:
        return command(args)
    except (options.WrongUsage, Rejected) as error:
        return _explain(error, run.USAGE)
    except BusError as error:
        return _explain(error, run.UNREACHABLE)
    except KeyboardInterrupt:
        return 130


def _rehearse(args: argparse.Namespace) -> int:
    _find_modules(args)
    return rehearse.rehearse(args)


def _run(args: argparse.Namespace) -> int:
    _find_modules(args)
    return run.run(options.read(args, os.environ.get("TRAINMOVER_SECRET")))


def _find_modules(args: argparse.Namespace) -> None:
    if args.module:
        sys.path.insert(0, os.getcwd())  # as `python -m` finds it


def _explain(error: Exception, code: int) -> int:
    print(f"trainmover: {error}", file=sys.stderr)
    return code


def _log_to_stderr(level: str) -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            _as_line,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _as_line(_: object, __: str, fields: MutableMapping[str, Any]) -> str:
    """`trainmover: warning: event key=value`."""
    level, event = fields.pop("level"), fields.pop("event")
    rest = "".join(f" {name}={value}" for name, value in fields.items())
    return f"trainmover: {level}: {event}{rest}"


if __name__ == "__main__":
    sys.exit(main())
