"""How long training stands still when a rank is killed: TrainMover and its rivals in one run.

    python bench/recovery.py --kills 10 --out /tmp/recovery

What is compared, and how it is measured: docs/benchmarks.md. The first run installs torchft into
.bench/, about a minute.
"""

import argparse
import json
import os
import platform
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).with_name("rivals")))

from console import add_out, say
from environment import TORCHFT, rivals_python
from jobs import CACHE, Healed, Job, Migrated, Restarted
from measure import DidNot, Outcome, Run
from picture import draw
from table import summary, table, verdicts

TURNS = 3
"""Jobs of each system, in an order that is rotated, so that noise of the machine hits all."""


@dataclass(frozen=True, slots=True)
class System:
    title: str
    start: Callable[[Path], Job]
    start_s: float
    kill_s: float
    """Estimates for the time left, until there are measured ones: a job's start, and each kill."""


def systems(tuned: argparse.Namespace) -> dict[str, System]:
    lighthouse = [
        f"--heartbeat_timeout_ms={tuned.tuned_heartbeat_ms}",
        f"--join_timeout_ms={tuned.tuned_join_ms}",
        "--quorum_tick_ms=20",
    ]
    timeout = f"--timeout-s={tuned.tuned_timeout_s}"
    spare = [timeout, "--min-replicas=4", "--spares"]
    return {
        "ours": System("TrainMover, rebindable", partial(migrated, "--rebindable"), 8, 5),
        "ours-setup-again": System("TrainMover, set-up again", partial(migrated), 8, 5),
        "ours-loader": System(
            "TrainMover, two loader workers",
            partial(migrated, "--rebindable", "--loader-workers=2"),
            9,
            6,
        ),
        "ours-expensive": System(
            "TrainMover, set-up again, which takes 1 s", partial(migrated, "--expensive"), 11, 8
        ),
        "restart": System("torchrun, all ranks restart", Restarted, 10, 9),
        "torchft": System("torchft, defaults", partial(healed, [], []), 10, 45),
        "torchft-tuned": System("torchft, tuned", partial(healed, lighthouse, [timeout]), 10, 9),
        "torchft-spare": System(
            "torchft, tuned, with a spare", partial(healed, lighthouse, spare, spares=1), 10, 9
        ),
    }


def migrated(*arguments: Any) -> Job:
    *script, folder = arguments
    return Migrated(folder, *script)


def healed(lighthouse: list[str], script: list[str], folder: Path, spares: int = 0) -> Job:
    return Healed(folder, lighthouse, script, spares)


def main() -> int:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the job
    compared = {name: s for name, s in systems(args).items() if name in args.systems}
    if any(name.startswith("torchft") for name in compared):
        rivals_python(CACHE)
    args.out.mkdir(parents=True, exist_ok=True)
    plan = order(list(compared), args.kills)
    outcomes: list[Outcome] = []
    deaths = dict.fromkeys(compared, 0)
    clock = Clock(compared)
    for index, (turn, name, kills) in enumerate(plan):
        left_s = sum(clock.estimate_s(n, k) for _, n, k in plan[index:])
        say(f"{index + 1} of {len(plan)}: {name}, {kills} kills; about {left_s / 60:.0f} min left")
        began_s = time.monotonic()
        folder = args.out / f"{name}-{turn}"
        random_ = random.Random(f"{args.seed}/{name}/{turn}")
        deaths[name] += one(name, turn, compared[name], folder, kills, random_, outcomes)
        clock.took(name, kills, time.monotonic() - began_s)
        found = {name: summary(name, outcomes) for name in compared}
        write(args, compared, found, outcomes, deaths)  # kept if the bench is cut short
    for text in (
        table({n: s.title for n, s in compared.items()}, found, deaths),
        verdicts(found),
    ):
        print(text)
    draw({n: s.title for n, s in compared.items()}, outcomes, args.out / "recovery.png")
    say(f"wrote {args.out / 'recovery.json'} and {args.out / 'recovery.png'}")
    return 0


def one(
    name: str,
    turn: int,
    system: System,
    folder: Path,
    kills: int,
    draws: random.Random,
    outcomes: list[Outcome],
) -> int:
    """One job with its kills, appended to `outcomes`. Returns the processes lost besides them."""
    folder.mkdir()

    def done(outcome: Outcome) -> None:
        outcomes.append(outcome)
        took = outcome.why if outcome.downtime_s is None else f"{outcome.downtime_s:.3f} s"
        say(f"  rank {outcome.rank} killed: {took}")

    before = len(outcomes)
    job = system.start(folder)
    try:
        Run(name, turn, job, folder / "ledger").kills(kills, draws, done)
    except DidNot as error:
        say(f"  {name}: {error}; its output is in {folder}")
    finally:
        job.stop()
    return max(0, job.own_deaths(len(outcomes) - before))


def order(names: list[str], kills: int) -> list[tuple[int, str, int]]:
    """(turn, system, kills) of each job; every turn begins with another system."""
    found = []
    for turn in range(TURNS):
        share = kills // TURNS + (turn < kills % TURNS)
        first = turn * len(names) // TURNS
        found += [(turn, n, share) for n in (*names[first:], *names[:first]) if share]
    return found


class Clock:
    """Guesses how long a job takes, better after each job of its system."""

    def __init__(self, compared: dict[str, System]) -> None:
        self.compared = compared
        self.factors: dict[str, float] = {}

    def estimate_s(self, name: str, kills: int) -> float:
        system = self.compared[name]
        return self.factors.get(name, 1.0) * (system.start_s + kills * system.kill_s)

    def took(self, name: str, kills: int, seconds: float) -> None:
        system = self.compared[name]
        self.factors[name] = seconds / (system.start_s + kills * system.kill_s)


def write(
    args: argparse.Namespace,
    compared: dict[str, System],
    found: dict[str, Any],
    outcomes: list[Outcome],
    deaths: dict[str, int],
) -> None:
    given = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    document = {
        "arguments": given,
        "machine": {"cores": os.cpu_count(), "system": platform.platform()},
        "versions": {
            "python": platform.python_version(),
            "torch": metadata.version("torch"),
            "torchft": TORCHFT,
            "trainmover": metadata.version("trainmover"),
        },
        "systems": {
            name: {"title": s.title, **found[name], "own_deaths": deaths[name]}
            for name, s in compared.items()
        },
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    (args.out / "recovery.json").write_text(json.dumps(document, indent=2) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kills", type=int, default=10, help="of each system (default 10)")
    add("--systems", help="with commas; default: all")
    add_out(parser, "JSON, picture and logs")
    add("--seed", type=int, default=0, help="draws ranks and moments (default 0)")
    add("--tuned-heartbeat-ms", type=int, default=500, help="of the lighthouse of tuned torchft")
    add("--tuned-join-ms", type=int, default=500, help="of the lighthouse of tuned torchft")
    add("--tuned-timeout-s", type=float, default=1.0, help="of operations of tuned torchft")
    args = parser.parse_args()
    known = list(systems(args))
    args.systems = known if args.systems is None else args.systems.split(",")
    if unknown := set(args.systems) - set(known):
        parser.error(f"--systems: expected some of {', '.join(known)}; got {', '.join(unknown)}")
    if args.kills < 1:
        parser.error(f"--kills: expected at least 1, got {args.kills}")
    return args


if __name__ == "__main__":
    sys.exit(main())
