"""The planner as a process: `python -m trainmover.services.planner`."""

import sys
from collections.abc import Sequence
from typing import Any

from trainmover.services import process
from trainmover.services.contract import Service

ABOUT = (
    "Failures and standbys in, assignments out: "
    "says who starts with which rank and who replaces whom."
)


def _load() -> Service[Any]:
    from trainmover.services.planner.decide import SERVICE  # after `--help` and wrong usage

    return SERVICE


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code; blocks until the job is over."""
    return process.main("planner", ABOUT, _load, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
