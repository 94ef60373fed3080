"""The detector as a process: `python -m trainmover.services.detector`."""

import sys
from collections.abc import Sequence
from typing import Any

from trainmover.services import process
from trainmover.services.contract import Service

ABOUT = (
    "Telemetry and evidence in, failures out: says which worker failed, how, and why it thinks so."
)


def _load() -> Service[Any]:
    from trainmover.services.detector.decide import SERVICE  # after `--help` and wrong usage

    return SERVICE


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code; blocks until the job is over."""
    return process.main("detector", ABOUT, _load, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
