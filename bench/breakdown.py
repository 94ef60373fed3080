"""What each part of a move spares: from restarting all ranks to a planned move, in one run.

    python bench/breakdown.py --out /tmp/breakdown

Three ranks with a compiled model; rank 1 gets a new process. Needs a C++ compiler. How it is
measured: docs/benchmarks.md.
"""

import argparse
import signal
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).with_name("rivals")))
sys.path.insert(0, str(Path(__file__).with_name("compiled")))

from cases import run, write
from console import add_out, say
from measuring import Move
from showing import breakdown, breakdown_table, draw

RANKS = 3
"""The fewest of which two keep a link when the third gets a new process."""
TITLES = {
    "restart": "all ranks restart from a checkpoint",
    "direct": "one new process, state from its peer",
    "cold": "+ only the links that change",
    "warm": "+ warm standby",
    "planned": "+ told before: planned move",
}
JOBS = ("restart", "direct", "cold", "warm")
"""The last one's rank is moved without a fault as well."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--turns", type=int, default=3, help="jobs of each, in turns (default 3)")
    add_out(parser, "JSON, picture and logs")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the job
    moves: list[Move] = []
    for turn in range(args.turns):
        first = turn % len(JOBS)
        for case in (*JOBS[first:], *JOBS[:first]):
            say(f"turn {turn + 1} of {args.turns}: {TITLES[case]}")
            folder = args.out / f"{case}-{turn}"
            found = run(case, RANKS, 1, folder, args.out / "cache", planned=case == "warm")
            moves += [replace(x, case="planned") if x.planned else x for x in found]
            told = breakdown(TITLES, moves)
            write(args.out / "breakdown.json", told, moves, TITLES)  # kept if it is cut short
    print(breakdown_table(TITLES, told))
    draw(TITLES, told, args.out / "breakdown.png")
    say(f"wrote {args.out / 'breakdown.json'} and {args.out / 'breakdown.png'}")
    return 0 if len(moves) == args.turns * len(TITLES) else 1


if __name__ == "__main__":
    sys.exit(main())
