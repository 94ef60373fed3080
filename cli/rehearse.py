"""`trainmover rehearse`: a script undisturbed twice and once with kills; are the bits the same?"""

import argparse
import json
import random
import secrets
import socket
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO
from uuid import uuid4

from trainmover.cli import drills, flags, options, run
from trainmover.cli.comparison import Ran
from trainmover.cli.console import Console
from trainmover.cli.options import RunOptions, WrongUsage
from trainmover.cli.report import Report
from trainmover.cli.timeline import terminal_width, timeline
from trainmover.cli.verdict import Findings, Verdict, in_words, judge
from trainmover.schemas.fault import Fault
from trainmover.schemas.steplog import StepLine

TITLES = ("undisturbed", "undisturbed", "with kills")
PREFIX = "rehearse: "
DIFFERS = 1
SIGNALLED = 128
"""Exit codes above it: somebody ended the rehearsal by that signal."""
LAST_LINES = 30
"""Of a run that failed, so many lines of its output are shown."""
EXAMPLE = """\
example:
  trainmover rehearse --steps 50 train.py --lr 0.1
      the first 50 steps three times, with two ranks and a standby; the third time two kills

The script is run unchanged, with all that it writes: give it folders that may be written to.
exit codes: 0 the same bits in all runs, 1 they differ, others as of `trainmover run`
"""


def add_to(parser: argparse.ArgumentParser) -> None:
    add = flags.add
    add(
        parser,
        "--steps",
        type=flags.positive,
        default=50,
        metavar="N",
        help="the first N steps only (default 50)",
    )
    add(parser, "--kills", type=flags.positive, default=2, metavar="K", help="default 2")
    add(
        parser,
        "--seed",
        type=flags.natural,
        metavar="S",
        help="draws rank, step and point of each kill (default: random, printed)",
    )
    add(parser, "--json", type=flags.output_file, metavar="FILE", help="write the findings as JSON")
    options.add_workers(parser, ranks=2)
    options.add_program(parser)


def rehearse(args: argparse.Namespace) -> int:
    """The exit code. Blocks until the runs are over; raises WrongUsage."""
    base = _options(args)
    seed = random.randrange(10_000) if args.seed is None else args.seed
    say(f"seed {seed}, layout {base.layout}, the first {base.max_steps} steps of {args.script}")
    kills: tuple[Fault, ...] = ()
    runs: list[Ran] = []
    for number in range(1, len(TITLES) + 1):
        if number == len(TITLES):
            kills = _draw(seed, args.kills, base, runs[0])
        runs.append(_run(base, number, kills))
        findings = judge(runs, kills)
        if findings.verdict is not Verdict.SAME:
            break
    if runs[-1].exit_code > SIGNALLED:
        return runs[-1].exit_code
    for text in in_words(findings):
        say(text)
    if args.json is not None:
        _write(args.json, findings, script=args.script, layout=str(base.layout), seed=seed)
    return _exit_code(findings)


def say(text: str) -> None:
    print(PREFIX + text, flush=True)


def _options(args: argparse.Namespace) -> RunOptions:
    layout = options.read_layout(args.layout, 1, args.nproc_per_node)
    if layout.replicas(0) == (0,):
        raise WrongUsage(
            f"in layout {layout} no rank has a replica, so a kill ends the job: rehearse with a dp"
            " axis of 2 or more (--nproc-per-node 2)"
        )
    name = options.job_name(args.script, "r" + uuid4().hex[:8])
    return RunOptions(
        program=options.read_program(args),
        layout=layout,
        num_machines=1,
        workers_per_machine=args.nproc_per_node,
        num_standbys=args.standbys,
        job=name,
        run=name,
        machine=options.as_name(socket.gethostname()),
        secret=secrets.token_hex(32),
        bus=None,
        log_dir=args.log_dir,
        num_threads=args.num_threads,
        max_steps=args.steps,
    )


def _draw(seed: int, wanted: int, base: RunOptions, undisturbed: Ran) -> tuple[Fault, ...]:
    report = undisturbed.report
    steps = (report.completed_steps if report else None) or 0
    kills = drills.draw(seed, wanted, ranks=base.layout.world_size, steps=steps)
    if len(kills) < wanted:
        say(f"{steps} steps have room for {len(kills)} of {wanted} kills: give more --steps")
    for kill in kills:
        say(f"rank {kill.rank} will be killed in step {kill.step}, at point `{kill.at}`")
    return kills


def _run(base: RunOptions, number: int, kills: Sequence[Fault]) -> Ran:
    """One job of the rehearsal; its output is shown only if it fails."""
    started_s = time.monotonic()
    title = TITLES[number - 1]
    transcript = _Transcript(f"{number} of {len(TITLES)}, {title}")
    with tempfile.TemporaryDirectory(prefix="tm-rehearse-") as folder:
        report = Path(folder, "report.json")
        code = run.run(
            replace(
                base,
                run="r" + uuid4().hex[:8],
                faults=tuple(map(str, kills)),
                report=report,
                step_digests=folder,
                log_dir=base.log_dir and base.log_dir / str(number),
            ),
            transcript,
        )
        ran = Ran(
            title=title,
            exit_code=code,
            seconds=time.monotonic() - started_s,
            lines=dict(_read(Path(folder))),
            report=Report.model_validate_json(report.read_text()) if report.exists() else None,
        )
    _sum_up(ran, transcript)
    return ran


class _Transcript(Console):
    """Keeps the last lines of a run; the terminal shows where it is."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        self.title = title

    def show(self, line: str, stream: TextIO) -> None:
        self.lines.append(line)

    def status(self, text: str) -> None:
        super().status(text and f"{PREFIX}{self.title}: {text}")


def _read(folder: Path) -> Iterator[tuple[tuple[int, int], StepLine]]:
    for path in folder.glob("rank*.jsonl"):
        rank = int(path.stem.removeprefix("rank"))
        for text in path.read_text().splitlines():
            line = StepLine.model_validate_json(text)
            yield (line.step, rank), line


def _sum_up(ran: Ran, transcript: _Transcript) -> None:
    """One line of a run that ended well and a timeline for each of its incidents; the last lines
    of one that failed."""
    if ran.exit_code > SIGNALLED:
        return
    if ran.exit_code:
        for text in transcript.lines:
            print(text)
        return
    assert ran.report is not None
    last = max(ran.lines, default=None)
    loss = ran.lines[last].numbers.get("loss") if last is not None else None
    shown = "" if loss is None else f", loss {loss:.4g}"
    say(f"{transcript.title}: {ran.report.completed_steps} steps in {ran.seconds:.1f} s{shown}")
    width = terminal_width() - len(PREFIX)
    for incident in ran.report.incidents:
        for text in timeline(incident, width).splitlines():
            say(text)


def _write(path: Path, findings: Findings, **given: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**given, **findings.model_dump(mode="json")}, indent=2) + "\n")


def _exit_code(findings: Findings) -> int:
    match findings.verdict:
        case Verdict.SAME:
            return 0
        case Verdict.FAILED:
            return findings.runs[-1].exit_code
        case _:
            return DIFFERS
