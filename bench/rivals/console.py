"""What the command lines of benches share: progress on stderr, and the folder of findings."""

import argparse
import sys
from pathlib import Path


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def add_out(parser: argparse.ArgumentParser, what: str) -> None:
    """`--out`, a folder for `what` that is new or empty."""
    parser.add_argument("--out", type=_new, required=True, help=f"new folder for {what}")


def _new(text: str) -> Path:
    path = Path(text)
    if path.exists() and any(path.iterdir()):
        raise argparse.ArgumentTypeError(
            f"expected a new or empty folder, {path} has something in it"
        )
    return path
