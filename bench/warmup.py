"""What it costs a job that its standby warms up, and its ranks that one of each class recorded.

    python bench/warmup.py --out /tmp/warmup
    python bench/warmup.py --turns 2 --free 1 --record 0 --out /tmp/short

Four stages of a pipeline, three role classes; the standby is killed again and again. How it is
measured: docs/benchmarks.md.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).with_name("rivals")))
sys.path.insert(0, str(Path(__file__).with_name("moves")))

from console import add_out, say
from findings import Beside, Found, found, markdown, of_prepares
from measure import DidNot
from parts import apart
from table import reached
from warmups import SET_UP, WarmUp, beside, crossed, recorded, stages

LIMIT = 1.03
"""Of a step, while a standby warms up on another core, and of a rank that has recorded."""
WINDOWS = 10
"""Of each job whose ranks record; an interval is over jobs, which differ more than windows."""
TITLES = {
    "prepare": "a standby warms up / nothing does",
    "equals": "nothing does / nothing does",
    "alone": "the set-ups outside the job / nothing does",
}
RECORDED = {"recorded": "a rank that recorded / one that did not", "equals": "two alike"}


@dataclass
class Measured:
    """What there is so far."""

    turns: list[Beside] = field(default_factory=list)
    warm_ups: list[WarmUp] = field(default_factory=list)
    """Pinned to a core of its own."""
    free: list[WarmUp] = field(default_factory=list)
    """Not pinned."""
    shares: dict[str, list[list[float]]] = field(
        default_factory=lambda: {"second": [], "first": []}
    )
    """Which of the two ranks recorded -> for each job, CPU time of the second over the first."""


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the job
    args.out.mkdir(parents=True, exist_ok=True)
    measured = Measured()
    failures = []
    for times, part in ((args.turns, pinned), (args.free, free), (args.record, recordings)):
        try:
            if times:
                say(f"{part.__name__}: starting")
                part(args.out, times, measured)
        except DidNot as error:
            failures.append(f"{part.__name__}: {error}; the output is in {args.out}")
            say(failures[-1])
        write(args, measured, failures)  # kept if the bench is cut short
    results = of(measured)
    print(tables(results))
    print(verdicts(results))
    print(*failures, sep="\n", end="")
    say(f"wrote {args.out / 'warmup.json'}")
    return 1 if failures else 0


# ---- what is done to the jobs


def pinned(out: Path, times: int, measured: Measured) -> None:
    """The ranks on one core, and all else on another."""
    script = ["--expensive"] * SET_UP
    with apart() as core, stages(out / "pinned", *script, core=core) as run:
        for _ in range(times):
            turn, warm_up = beside(run)
            measured.turns.append(turn)
            measured.warm_ups.append(warm_up)
            ratios = (f"{name} {x:.3f}" for name, x in turn.ratios("cpu_s").items())
            say(f"  CPU of a step in {turn.prepare.steps} steps: {', '.join(ratios)}")


def free(out: Path, times: int, measured: Measured) -> None:
    """Every process where the system puts it."""
    with stages(out / "free", *["--expensive"] * SET_UP) as run:
        for _ in range(times):
            warm_up = run.warm_up()
            measured.free.append(warm_up)
            say(f"  warm after {warm_up.until_warm_s:.2f} s, {warm_up.cpu_s:.2f} s of CPU time")


def recordings(out: Path, times: int, measured: Measured) -> None:
    """Two jobs each time: in one the second of two equal ranks records, in one the first."""
    with apart() as core:
        for count in range(times):
            for recorder, script in (("second", ()), ("first", ("--halves",))):
                folder = out / f"record-{recorder}-{count}"
                with stages(folder, *script, standbys=0, core=core) as run:
                    found_here = recorded(run, WINDOWS)
                measured.shares[recorder].append(found_here)
                say(f"  the {recorder} recorded: {statistics.median(found_here):.3f}")


# ---- what it says


def of(measured: Measured) -> dict[str, Any]:
    """What was not measured is empty."""
    return {
        "beside": of_prepares(measured.turns),
        "warm_ups": {
            name: of_warm_ups(each)
            for name, each in (("pinned", measured.warm_ups), ("free", measured.free))
            if each
        },
        "recorded": of_recordings(measured.shares),
    }


def of_warm_ups(warm_ups: Sequence[WarmUp]) -> dict[str, Any]:
    """Seconds, medians."""
    return {
        "warm_ups": len(warm_ups),
        "until_warm": found([w.until_warm_s for w in warm_ups], statistics.median),
        "cpu": found([w.cpu_s for w in warm_ups], statistics.median),
        "classes": {
            name: statistics.median(w.classes[name] for w in warm_ups)
            for name in warm_ups[0].classes
        },
    }


def of_recordings(shares: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Found]:
    """Ratios of CPU time of a step; equals need two jobs of each kind."""
    seconds, firsts = shares["second"], shares["first"]
    pairs = {
        "recorded": list(zip(seconds, firsts, strict=False)),
        "equals": [
            (jobs[n], jobs[n + 1]) for jobs in (seconds, firsts) for n in range(len(jobs))[:-1]
        ],
    }
    ratios = {name: [crossed(*pair) for pair in each] for name, each in pairs.items()}

    def median(of: Sequence[Sequence[float]]) -> float:
        return statistics.median(x for each in of for x in each)

    return {name: found(each, median) for name, each in ratios.items() if each}


def tables(results: Mapping[str, Any]) -> str:
    """Markdown; what was not measured has no table."""
    parts = []
    if beside_it := results["beside"]:
        rows = [("a step", "CPU time", "wall time")]
        for name, title in TITLES.items():
            rows.append((title, *(beside_it[what][name].shown() for what in ("cpu_s", "wall_s"))))
        parts.append(markdown(rows))
    if warm_ups := results["warm_ups"]:
        rows = [
            (
                "standby",
                "warm-ups",
                "from the kill until warm, s",
                "CPU time, s",
                "runs of train, s",
            )
        ]
        for name, each in warm_ups.items():
            runs = ", ".join(f"{role} {seconds:.2f}" for role, seconds in each["classes"].items())
            figures = (each[what].shown(2) for what in ("until_warm", "cpu"))
            rows.append((name, str(each["warm_ups"]), *figures, runs))
        parts.append(markdown(rows))
    if recorded_it := results["recorded"]:
        rows = [("CPU time of a step", "ratio")]
        rows += [(RECORDED[name], each.shown()) for name, each in recorded_it.items()]
        parts.append(markdown(rows))
    return "\n\n".join(parts)


def verdicts(results: Mapping[str, Any]) -> str:
    """What was reached and what was not, a line each; nothing about what was not measured."""
    lines = []
    for what, name in (("cpu_s", "CPU"), ("wall_s", "wall")):
        if results["beside"]:
            ratio, equals = (results["beside"][what][of] for of in ("prepare", "equals"))
            lines.append(
                f"{reached(ratio.value <= LIMIT)}: while a standby warms up a step takes "
                f"{ratio.shown()} of its {name} time, wanted at most {LIMIT:g} (equals: "
                f"{equals.shown()})"
            )
    if "recorded" in results["recorded"]:
        ratio, equals = (results["recorded"].get(of) for of in ("recorded", "equals"))
        beside_it = f" (two alike: {equals.shown()})" if equals else ""
        lines.append(
            f"{reached(ratio.value <= LIMIT)}: a rank that recorded takes {ratio.shown()} of the "
            f"CPU time of one that did not, wanted at most {LIMIT:g}{beside_it}"
        )
    return "\n".join(lines)


def write(args: argparse.Namespace, measured: Measured, failures: list[str]) -> None:
    document = {
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "machine": {"cores": os.cpu_count(), "system": platform.platform()},
        "versions": {
            "python": platform.python_version(),
            "torch": metadata.version("torch"),
            "trainmover": metadata.version("trainmover"),
        },
        "results": of(measured),
        "failures": failures,
        "measured": asdict(measured),
    }
    text = json.dumps(document, indent=1, default=asdict)
    (args.out / "warmup.json").write_text(text + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--turns", type=int, default=8, help="warm-ups beside pinned ranks; 0: none (default 8)")
    add("--free", type=int, default=5, help="warm-ups that are not pinned (default 5)")
    add("--record", type=int, default=3, help="pairs of jobs whose ranks record (default 3)")
    add_out(parser, "JSON and logs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
