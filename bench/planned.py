"""What it costs to move ranks to standbys without a fault: downtime, steps beside it, endurance.

    python bench/planned.py --out /tmp/planned
    python bench/planned.py --moves 3 --more 2 --prepares 2 --endurance 0 --out /tmp/short

Four ranks with 1.3 million parameters and 100 MB of state that is not trained move by `trainmover
migrate`. How it is measured: docs/benchmarks.md.
"""

import argparse
import json
import os
import platform
import random
import signal
import sys
from dataclasses import asdict, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).with_name("rivals")))
sys.path.insert(0, str(Path(__file__).with_name("moves")))

from console import add_out, say
from drawing import draw
from findings import of_endurance, of_moves, of_prepares, tables, verdicts
from measure import DidNot
from parts import Measured, Parts


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the job
    args.out.mkdir(parents=True, exist_ok=True)
    measured = Measured()
    parts = Parts(args.out, args.state_mb, random.Random(args.seed), measured, say)
    failures = []
    for wanted, part, arguments in (
        (args.moves, parts.moves, ({1: args.moves, 2: args.more, 3: args.more},)),
        (args.prepares, parts.prepares, (args.prepares,)),
        (
            args.endurance,
            parts.endurance,
            (args.every, round(args.endurance / args.every), round(args.restarts / args.every)),
        ),
    ):
        try:
            if wanted:
                part(*arguments)
        except (DidNot, ValueError) as error:
            failures.append(f"{part.__name__}: {error}; the output is in {args.out}")
            say(failures[-1])
        write(args, measured, failures)  # kept if the bench is cut short
    found = results(measured)
    print(tables(*found))
    print(verdicts(*found))
    print(f"steps that were done twice: {measured.done_again}", *failures, sep="\n")
    draw(*found, measured.endured, args.out / "planned.png")
    say(f"wrote {args.out / 'planned.json'} and {args.out / 'planned.png'}")
    return 1 if failures else 0


def results(measured: Measured) -> tuple[Any, Any, Any]:
    return (
        of_moves(measured.moves),
        of_prepares(measured.turns),
        of_endurance(measured.endured),
    )


def write(args: argparse.Namespace, measured: Measured, failures: list[str]) -> None:
    moved, beside, endured = results(measured)
    document = {
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "machine": {"cores": os.cpu_count(), "system": platform.platform()},
        "versions": {
            "python": platform.python_version(),
            "torch": metadata.version("torch"),
            "trainmover": metadata.version("trainmover"),
        },
        "results": {"moves": moved, "prepares": beside, "endurance": endured},
        "failures": failures,
        "measured": asdict(measured),
    }
    text = json.dumps(document, indent=1, default=plain)
    (args.out / "planned.json").write_text(text + "\n")


def plain(value: object) -> object:
    """What a dataclass is in JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"expected something of JSON or a dataclass, got {type(value).__name__}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--moves", type=int, default=10, help="of one rank; 0: leave them out (default 10)")
    add("--more", type=int, default=6, help="of two at once, and of three (default 6)")
    add("--prepares", type=int, default=8, help="watched for what they cost (default 8)")
    add("--endurance", type=float, default=300.0, metavar="SECONDS", help="default 300")
    add("--restarts", type=float, default=90.0, metavar="SECONDS",
        help="of the rival in it (default 90)")  # fmt: skip
    add("--every", type=float, default=30.0, metavar="SECONDS",
        help="between interruptions in both (default 30)")  # fmt: skip
    add("--state-mb", type=int, default=100, help="of each rank beside the model (default 100)")
    add("--seed", type=int, default=0, help="draws the ranks (default 0)")
    add_out(parser, "JSON, picture and logs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
