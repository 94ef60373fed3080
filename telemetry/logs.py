"""How every process of TrainMover logs: which lines, in which form, with which fields."""

import sys
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import structlog
from structlog.typing import Processor

FORMAT = "TRAINMOVER_LOG_FORMAT"
"""`json`: what people would read on the terminal becomes JSON lines too."""

Facts = Callable[[], Mapping[str, object]]


def json_wanted(env: Mapping[str, str]) -> bool:
    return env.get(FORMAT, "").lower() == "json"


def configure(level: str, *, as_json: bool, about: Mapping[str, object]) -> "Subject":
    """Log to stderr from `level` on; JSON lines carry `about` and what the subject knows."""
    subject = Subject(about)
    lines: list[Processor] = [
        subject,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    ]
    structlog.configure(
        processors=lines if as_json else None,  # None: structlog's own, for people
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    return subject


class Subject:
    """What the lines of this process are about: fixed fields, and facts asked for at each line.

    Facts are pulled, so that no thread has to tell the log when a generation changes.
    """

    def __init__(self, about: Mapping[str, object]) -> None:
        self._about = about
        self.facts: Facts = dict

    def __call__(self, _: object, __: str, line: MutableMapping[str, Any]) -> Mapping[str, Any]:
        return {**self._about, **self.facts(), **line}
