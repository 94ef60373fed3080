"""The flags of `trainmover run`, and what they mean together."""

import argparse
import re
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

from trainmover.agent.orders import Program
from trainmover.cli import flags
from trainmover.schemas.fault import Fault
from trainmover.schemas.layout import Layout

EXAMPLE = """\
example:
  trainmover run --nproc-per-node 4 --standbys 1 train.py --lr 0.1
      four ranks and one standby on this machine; kill any of the ranks and look
  trainmover run --bus nats://host:4222 --job j --nnodes 2 --nproc-per-node 8 train.py
      the same on each of two machines; `trainmover services` runs beside them

exit codes: 0 completed, 1 user code failed, 2 wrong usage, 3 stalled too long, 4 state lost,
5 no progress, 6 bus or services not reachable, 130 Ctrl-C, 143 SIGTERM
"""


LOOPBACK = ("127.0.0.1", "localhost", "::1")


class WrongUsage(ValueError):
    """Flags that do not fit each other or this machine; exit code 2."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    program: Program
    layout: Layout
    num_machines: int
    workers_per_machine: int
    num_standbys: int
    job: str
    run: str
    machine: str
    secret: str = field(repr=False)
    """Hex."""
    bus: str | None = field(repr=False)
    """None: the embedded server and services."""
    host: str = "127.0.0.1"
    port_range: str = ""
    faults: tuple[str, ...] = ()
    report: Path | None = None
    log_dir: Path | None = None
    trace_dir: Path | None = None
    step_digests: str = ""
    max_steps: int = 0
    """0: as many as the script asks for."""
    num_threads: int = 1
    hash_seed: int = 0
    stall_timeout_s: float = 3600.0
    max_incidents: int = 3
    max_failures: int | None = None
    warm_up: bool = True
    max_planned: int | None = None
    grace_s: float = 20.0
    labels: tuple[str, ...] = ()


def add_to(parser: argparse.ArgumentParser) -> None:
    add = flags.add
    one = flags.positive
    add_workers(parser, ranks=1)
    add(parser, "--nnodes", type=one, default=1, metavar="N", help="machines")
    add(
        parser,
        "--bus",
        type=flags.bus_url,
        metavar="URL",
        help="join a job on this NATS server; needs --job",
    )
    add(parser, "--job", type=flags.name, metavar="NAME", help="default: script and a number")
    add(parser, "--machine", type=flags.name, metavar="NAME", help="default: the host name")
    add(
        parser,
        "--fault",
        type=flags.fault,
        action="append",
        default=[],
        metavar="KIND:rank=R,step=S",
        help="inject a fault, as kill:rank=1,step=20; repeatable",
    )
    add(
        parser,
        "--report",
        type=_report_file,
        metavar="FILE",
        help="write what happened as JSON, or as a page where FILE ends in .html",
    )
    add(
        parser,
        "--trace-dir",
        type=flags.output_folder,
        metavar="DIR",
        help="spans of incidents, as JSON lines",
    )
    add(
        parser,
        "--step-digests",
        type=flags.output_folder,
        metavar="DIR",
        help="digests of the state after every step",
    )
    add(
        parser,
        "--host",
        "--interface",
        default="127.0.0.1",
        metavar="ADDR",
        help="address that workers listen on and are reached at",
    )
    add(parser, "--port-range", type=flags.port_range, metavar="A-B", help="for links")
    add(
        parser,
        "--stall-timeout",
        type=flags.seconds,
        default=3600.0,
        metavar="S",
        help="give up when held this long without a standby (default 1 h)",
    )
    add(
        parser,
        "--max-incidents",
        type=one,
        default=3,
        metavar="N",
        help="interruptions without a committed step between them (default 3)",
    )
    add(parser, "--max-failures", type=flags.natural, metavar="N", help="default: no limit")
    add(
        parser,
        "--no-warmup",
        action="store_true",
        help="standbys run the script only when they get a rank",
    )
    add(
        parser,
        "--max-planned",
        type=flags.natural,
        metavar="N",
        help="ranks that may move without a fault; more are refused (default: no limit)",
    )
    add(
        parser,
        "--grace",
        type=flags.duration,
        default=20.0,
        metavar="TIME",
        help="from SIGTERM to the end of this machine: its ranks move meanwhile (default 20 s)",
    )
    add(
        parser,
        "--label",
        type=flags.label,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of this machine, as zone=a, rack=r12, switch=s3: a standby that shares none of"
        " them with the leaver is preferred; repeatable",
    )
    add_program(parser)


def add_workers(parser: argparse.ArgumentParser, *, ranks: int) -> None:
    """What a machine has of a job; `ranks`: on each machine by default."""
    add = flags.add
    add(
        parser,
        "--nproc-per-node",
        type=flags.positive,
        default=ranks,
        metavar="N",
        help=f"ranks on each machine (default {ranks})",
    )
    add(
        parser,
        "--standbys",
        type=flags.natural,
        default=1,
        metavar="N",
        help="workers on each machine that stand by (default 1)",
    )
    add(parser, "--layout", metavar="AXES", help="as pp=2,dp=4; default dp=<all ranks>")
    add(
        parser,
        "--num-threads",
        type=flags.positive,
        default=1,
        metavar="N",
        help="OMP threads a worker",
    )
    add(
        parser,
        "--log-dir",
        type=flags.output_folder,
        metavar="DIR",
        help="keep each worker's raw output",
    )


def add_program(parser: argparse.ArgumentParser) -> None:
    """The script and its arguments; the last of a command's flags."""
    add = flags.add
    flags.refuse(parser)
    add(parser, "--module", "-m", action="store_true", help="the script is a module, as python -m")
    parser.add_argument("script", help="what each worker runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="given to the script")


def _report_file(text: str) -> Path:
    if text.endswith(".png"):
        raise argparse.ArgumentTypeError(
            "a run writes JSON, or a page where FILE ends in .html: give a name that ends in .json"
            f" and then `trainmover report FILE.json --png {text}`"
        )
    return flags.output_file(text)


def read(args: argparse.Namespace, secret: str | None) -> RunOptions:
    """`secret`: TRAINMOVER_SECRET. Raises WrongUsage."""
    if args.bus and not args.job:
        raise WrongUsage("--bus needs --job NAME: machines that give the same name join one job")
    if args.nnodes > 1 and not args.bus:
        raise WrongUsage(
            f"--nnodes {args.nnodes} needs --bus nats://HOST:PORT and --job NAME, the same on every"
            " machine: the embedded bus serves one machine"
        )
    layout = read_layout(args.layout, args.nnodes, args.nproc_per_node)
    for fault in args.fault:
        _check_fault(fault, layout)
    run = "r" + uuid4().hex[:8]
    return RunOptions(
        program=read_program(args),
        layout=layout,
        num_machines=args.nnodes,
        workers_per_machine=args.nproc_per_node,
        num_standbys=args.standbys,
        job=args.job or job_name(args.script, run),
        run=run,
        machine=args.machine or as_name(socket.gethostname()),
        secret=secret_in_hex(secret) or ("" if args.bus else secrets.token_hex(32)),
        bus=args.bus,
        host=args.host,
        port_range=args.port_range or "",
        faults=tuple(args.fault),
        report=args.report,
        log_dir=args.log_dir,
        trace_dir=args.trace_dir,
        step_digests=str(args.step_digests.absolute()) if args.step_digests else "",
        num_threads=args.num_threads,
        stall_timeout_s=args.stall_timeout,
        max_incidents=args.max_incidents,
        max_failures=args.max_failures,
        warm_up=not args.no_warmup,
        max_planned=args.max_planned,
        grace_s=args.grace,
        labels=tuple(args.label),
    )


def read_program(args: argparse.Namespace) -> Program:
    return Program(script=args.script, arguments=tuple(args.arguments), module=args.module)


def read_layout(text: str | None, num_machines: int, per_machine: int) -> Layout:
    """Raises WrongUsage."""
    world_size = num_machines * per_machine
    if text is None:
        return Layout.parse(f"dp={world_size}")
    try:
        layout = Layout.parse(text)
    except ValueError as error:
        raise WrongUsage(f"--layout: {error}") from error
    if layout.world_size != world_size:
        raise WrongUsage(
            f"--layout {layout} has {layout.world_size} ranks, but --nnodes {num_machines} x"
            f" --nproc-per-node {per_machine} makes {world_size}: make them equal"
        )
    return layout


def _check_fault(text: str, layout: Layout) -> None:
    if text.startswith("@"):
        return  # a file that may change while the job runs
    fault = Fault.parse(text)
    if fault.rank is not None and not 0 <= fault.rank < layout.world_size:
        raise WrongUsage(
            f"--fault {text}: layout {layout} has ranks 0..{layout.world_size - 1}, got rank"
            f" {fault.rank}"
        )
    if fault.step is not None and fault.step < 0:
        raise WrongUsage(f"--fault {text}: steps count from 0, got {fault.step}")


def secret_in_hex(text: str | None) -> str:
    """TRAINMOVER_SECRET as it stands in the environment, "" when it is not set.

    Raises WrongUsage, which does not show it.
    """
    if text and not re.fullmatch(r"([0-9a-f]{2})+", text):
        raise WrongUsage(
            "TRAINMOVER_SECRET is an even number of hex digits (0-9, a-f), at best 64:"
            f" what is set has {len(text)} characters and is not that"
        )
    return text or ""


def warnings(options: RunOptions) -> list[str]:
    """What a person should know before the job starts, one line each."""
    found: list[str] = []
    if options.layout.replicas(0) == (0,):
        found.append(
            f"in layout {options.layout} no rank has a replica: a death ends the job with exit"
            " code 4 (a dp axis of 2 or more makes replicas)"
        )
    if options.bus is not None and not options.secret:
        found.append(
            "TRAINMOVER_SECRET is not set: whoever reaches the bus can end or change this job"
        )
    if options.num_machines > 1 and options.host in LOOPBACK:
        found.append(
            f"--host {options.host} is reached from this machine only: give the address that the"
            f" other {'machine reaches' if options.num_machines == 2 else 'machines reach'} it at"
        )
    return found


def job_name(script: str, run: str) -> str:
    """`train-3f2a9c01`: a second start of the same script is another job."""
    return f"{as_name(Path(script).stem)[:50].rstrip('-')}-{run[1:]}"


def as_name(text: str) -> str:
    """The nearest name: lower-case letters, digits and inner dashes, 63 characters."""
    cleaned = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:48].strip("-")
    return cleaned or "job"
