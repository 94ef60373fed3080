"""`trainmover report`: a job and its incidents as text, JSON, page or picture."""

import argparse
import asyncio
import time
from pathlib import Path

from trainmover.cli import flags, reach
from trainmover.cli.console import for_reader
from trainmover.cli.options import WrongUsage
from trainmover.cli.page import page
from trainmover.cli.plot import NoMatplotlib, plot
from trainmover.cli.report import NoReport, Report, exit_code_of, read, report, summary
from trainmover.cli.submission import past_of
from trainmover.cli.timeline import story, terminal_width
from trainmover.cli.view import view

EXAMPLE = """\
examples:
  trainmover report --html report.html
      of the job that runs on this machine
  trainmover report report.json --png incidents.png
      of what `trainmover run --report report.json` wrote
"""


def add_to(parser: argparse.ArgumentParser) -> None:
    reach.add_to(parser)
    flags.add(parser, "--json", action="store_true", help="as `run --report` writes it")
    flags.add(parser, "--html", type=flags.output_file, metavar="FILE", help="write one page")
    flags.add(
        parser,
        "--png",
        type=flags.output_file,
        metavar="FILE",
        help="write the timelines as a picture",
    )
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="that `run --report FILE` wrote, whatever --job and --bus (or their variables) say;"
        " without it the job is read from its bus",
    )


def tell(args: argparse.Namespace) -> int:
    """Raises WrongUsage."""
    return for_reader(lambda: _tell(args))


def _tell(args: argparse.Namespace) -> int:
    try:
        found = asyncio.run(_of_bus(reach.target(args))) if args.file is None else read(args.file)
        for path in filter(None, (args.html, args.png)):
            path.parent.mkdir(parents=True, exist_ok=True)
        if args.html is not None:
            write_page(found, args.html)
        if args.png is not None:
            plot(found, args.png)
    except OSError as error:
        raise WrongUsage(f"{error.filename}: {error.strerror}: give another file") from error
    except (NoReport, NoMatplotlib) as error:
        raise WrongUsage(str(error)) from error
    if args.json:
        print(found.model_dump_json(indent=2))
    elif args.html is None and args.png is None:
        print("\n".join(in_text(found, terminal_width())))
    return 0


def write(found: Report, path: Path) -> None:
    """As `run --report` does: a page where the name ends in .html, else JSON. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".html":
        write_page(found, path)
    else:
        path.write_text(found.model_dump_json(indent=2) + "\n", encoding="utf-8")


def write_page(found: Report, path: Path) -> None:
    path.write_text(page(found), encoding="utf-8")


def in_text(found: Report, width: int) -> list[str]:
    facts = [f"{what:<17} {value}" for what, value in summary(found)]
    return [*facts, *(f"\n{story(incident, width)}" for incident in found.incidents)]


async def _of_bus(target: reach.Target) -> Report:
    async with reach.connected(target) as bus:
        past = reach.readable(await past_of(bus, target.job, target.secret), target.job)
    submitted = view(past.records).submitted
    if submitted is None:
        raise WrongUsage(f"no job {target.job} was submitted on this bus")
    of_run = [r for r in past.records if r.event.run == submitted.run]
    return report(
        of_run,
        job=submitted.job,
        run=submitted.run,
        layout=str(submitted.layout),
        exit_code=exit_code_of(of_run),
        now=time.time(),
    )
