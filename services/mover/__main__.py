"""The mover as a process: `python -m trainmover.services.mover`."""

import sys
from collections.abc import Sequence
from typing import Any

from trainmover.services import process
from trainmover.services.contract import Service

ABOUT = (
    "A plan in, commands to the workers out: "
    "leads every member of a new generation to its first step."
)


def _load() -> Service[Any]:
    from trainmover.services.mover.decide import SERVICE  # after `--help` and wrong usage

    return SERVICE


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code; blocks until the job is over."""
    return process.main("mover", ABOUT, _load, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
