"""A job left alone, then the same job with a rank killed: both must end in the same bits.

    python examples/demo.py --seed 7

Both are real `trainmover run` jobs of examples/gpt_bytes.py, two ranks and one standby; rank,
step and point of the kill are drawn from the seed.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmover.schemas.fault import POINTS

SCRIPT = Path(__file__).with_name("gpt_bytes.py")
RANKS = 2
FIRST_KILL = 8
"""By this step the standby has warmed up; before it, recovery would wait for that."""
LAST_STEPS = 5
"""Steps that are left after the latest kill."""
WITHIN_S = 120.0
"""A job takes about 12 s; one that takes ten times as long hangs."""


@dataclass(frozen=True)
class Ended:
    """What a job left behind."""

    report: dict[str, Any]
    digests: dict[tuple[int, int], str]
    """(step, rank) -> digest of the rank's state after that step."""


def main() -> int:
    args = parse()
    draw = random.Random(args.seed)
    rank, step = draw.randrange(RANKS), draw.randint(FIRST_KILL, args.steps - LAST_STEPS)
    point = draw.choice([p for p in POINTS if p != "end"])
    say(f"seed {args.seed}: rank {rank} will be killed in step {step}, at point `{point}`")
    with tempfile.TemporaryDirectory(prefix="tm-demo-") as folder:
        say(f"1 of 2: {args.steps} steps, undisturbed")
        undisturbed = run(Path(folder, "undisturbed"), args.steps)
        say("2 of 2: the same, with the kill")
        fault = f"--fault=kill:rank={rank},step={step},at={point}"
        disturbed = run(Path(folder, "disturbed"), args.steps, fault)
    wrong = difference(undisturbed, disturbed)
    if wrong:
        say(f"FAILED: {wrong}")
        return 1
    incident = disturbed.report["incidents"][0]
    say(
        f"rank {rank} died in step {step}, {incident['joiners'][0]} took it over within "
        f"{incident['downtime_s']:.2f} s, and {len(disturbed.digests)} digests of the state after "
        f"a step ({args.steps} steps, {RANKS} ranks) and the one at the end are the same."
    )
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="draws the kill (default: random, printed)")
    parser.add_argument("--steps", type=int, default=30, help="steps of each job (default 30)")
    args = parser.parse_args()
    if args.steps < FIRST_KILL + LAST_STEPS:
        parser.error(f"--steps: expected at least {FIRST_KILL + LAST_STEPS}, got {args.steps}")
    if args.seed is None:
        args.seed = random.randrange(10_000)
    return args


def say(text: str) -> None:
    print(f"demo: {text}", flush=True)


def run(folder: Path, steps: int, *more: str) -> Ended:
    """One job to its end, its output on this terminal. Exits with 1 when the job fails."""
    digests = folder / "digests"
    digests.mkdir(parents=True)
    report = folder / "report.json"
    command = [
        *(sys.executable, "-m", "trainmover.cli.main", "run"),
        *(f"--nproc-per-node={RANKS}", "--standbys=1"),
        *(f"--report={report}", f"--step-digests={digests}", *more),
        *(str(SCRIPT), f"--steps={steps}"),
    ]
    code = subprocess.run(command, timeout=WITHIN_S).returncode
    if code != 0:
        raise SystemExit(f"demo: FAILED: expected exit code 0 of the job, got {code}")
    found: dict[tuple[int, int], str] = {}
    for rank in range(RANKS):
        for line in (digests / f"rank{rank}.jsonl").read_text().splitlines():
            entry = json.loads(line)
            found[entry["step"], rank] = entry["digest"]
    return Ended(json.loads(report.read_text()), found)


def difference(undisturbed: Ended, disturbed: Ended) -> str:
    """What tells the two apart, the first step first; empty when nothing does.

    One digest may be missing: of a rank that died between its commit and writing it.
    """
    completed = [i for i in disturbed.report["incidents"] if i["outcome"] == "completed"]
    if len(completed) != 1 or undisturbed.report["incidents"]:
        return f"expected one completed incident in the second job only, got {completed}"
    if len(disturbed.digests) < len(undisturbed.digests) - 1:
        return f"only {len(disturbed.digests)} of {len(undisturbed.digests)} digests were written"
    for step, rank in sorted(disturbed.digests):
        if disturbed.digests[step, rank] != undisturbed.digests.get((step, rank)):
            return f"rank {rank} differs for the first time after step {step}"
    for name in ("completed_steps", "state_digest"):
        one, other = undisturbed.report[name], disturbed.report[name]
        if one != other:
            return f"{name}: {one} undisturbed, {other} disturbed"
    return ""


if __name__ == "__main__":
    sys.exit(main())
