"""What a warm standby spares a compiled model: the first step after a promotion, warm and cold.

    python bench/promotion.py --out /tmp/promotion

Two ranks, whose rank 1 is killed again and again. Needs a C++ compiler. How it is measured:
docs/benchmarks.md.
"""

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).with_name("rivals")))
sys.path.insert(0, str(Path(__file__).with_name("compiled")))

from cases import run, write
from console import add_out, say
from measuring import Move
from showing import promotion_table, promotion_verdicts, promotions

RANKS = 2
TITLES = {
    "warm": "warm, `train` runs again",
    "warm-rebound": "warm, rebindable",
    "cold-cached": "cold, on a machine that has compiled it",
    "cold": "cold, on a machine that has not",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kills", type=int, default=5, help="of each kind of standby (default 5)")
    add("--cases", help=f"with commas, of {', '.join(TITLES)}; default: all")
    add_out(parser, "JSON and logs")
    args = parser.parse_args()
    cases = args.cases.split(",") if args.cases else list(TITLES)
    if unknown := set(cases) - set(TITLES):
        parser.error(f"--cases: expected some of {', '.join(TITLES)}; got {', '.join(unknown)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the job
    moves: list[Move] = []
    for case in cases:
        say(f"{TITLES[case]}: {args.kills} kills")
        moves += run(case, RANKS, args.kills, args.out / case, args.out / "cache")
        found = promotions({c: TITLES[c] for c in cases}, moves)
        write(args.out / "promotion.json", found, moves, TITLES)  # kept if it is cut short
    print(promotion_table(TITLES, found))
    print(promotion_verdicts(found))
    return 0 if len(moves) == args.kills * len(cases) else 1


if __name__ == "__main__":
    sys.exit(main())
