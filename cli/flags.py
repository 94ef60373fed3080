"""How flags are spelled: torchrun's words, `-` or `_`, an environment variable for each."""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from trainmover.schemas.fault import Fault
from trainmover.schemas.names import NAME_PATTERN

PREFIX = "TRAINMOVER_"
_SECONDS_IN = {"s": 1.0, "m": 60.0, "h": 3600.0}

REFUSED = {
    "--max-restarts": "nothing is restarted: a standby takes over the rank and the others go on;"
    " limit interruptions with --max-failures and --max-incidents, and --standbys sets the reserve",
    "--rdzv-backend": "workers meet on the bus: give --bus nats://HOST:PORT on every machine",
    "--rdzv-endpoint": "workers meet on the bus: give --bus nats://HOST:PORT on every machine",
    "--rdzv-id": "a job has a name: give --job NAME on every machine",
    "--rdzv-conf": "workers meet on the bus, which needs no settings: give --bus and --job",
    "--node-rank": "machines need no numbers: ranks go to machines in the order of their names;"
    " --machine NAME sets this machine's (its host name by default)",
    "--master-addr": "nothing listens there: give --bus nats://HOST:PORT on every machine",
    "--standalone": "`run` without --bus is that: it brings its own bus and services",
    "--master-port": "nothing listens there: give --bus nats://HOST:PORT on every machine",
}
"""torchrun's flags that mean something else here, and the sentence that replaces each."""


class Parser(argparse.ArgumentParser):
    """Answers what it does not know with its own usage and the nearest flag it has."""

    def parse_known_args(  # type: ignore[override]  # typeshed's overloads say no more than this
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            given = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(given, self._option_string_actions, 1)
            self.error(f"no flag {given} here" + (f": did you mean {near[0]}?" if near else ""))
        self._tell_of_flags_of_the_script(getattr(known, "arguments", ()))
        return known, unknown

    def _tell_of_flags_of_the_script(self, arguments: Sequence[str]) -> None:
        """As with torchrun they are the script's; who meant them for us hears of it."""
        ours = self._option_string_actions.keys()
        taken = [flag for a in arguments if (flag := a.partition("=")[0]) in ours]
        if taken:
            print(
                f"{self.prog}: note: {', '.join(taken)} after the script is given to the script;"
                " what is meant for trainmover stands before it",
                file=sys.stderr,
            )


class _Refuse(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> NoReturn:
        flag = self.option_strings[0]
        parser.error(f"{flag} does not exist here: {REFUSED[flag]}")


def add(parser: argparse.ArgumentParser, name: str, *more: str, **options: Any) -> None:
    """Add `--some-flag`, its spelling `--some_flag`, and TRAINMOVER_SOME_FLAG as its default."""
    dest = options.setdefault("dest", name.removeprefix("--").replace("-", "_"))
    variable = PREFIX + dest.upper()
    options["help"] = f"{options['help']} [{variable}]"
    set_to = _from_environment(parser, options, variable, os.environ)
    if set_to is not None:
        options["default"] = set_to
    action = parser.add_argument(name, *more, **options)
    underscored = "--" + name.removeprefix("--").replace("-", "_")
    if underscored != name:
        hidden = {**options, "help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
        if "metavar" not in hidden and "action" not in hidden:
            hidden["metavar"] = action.metavar
        parser.add_argument(underscored, **hidden)


def refuse(parser: argparse.ArgumentParser) -> None:
    """Have the parser answer torchrun's flags that do not exist here with what replaces them."""
    for name in REFUSED:
        underscored = "--" + name.removeprefix("--").replace("-", "_")
        parser.add_argument(
            name, underscored, action=_Refuse, nargs="?", default=None, help=argparse.SUPPRESS
        )


def _from_environment(
    parser: argparse.ArgumentParser,
    options: Mapping[str, Any],
    variable: str,
    environ: Mapping[str, str],
) -> Any:
    text = environ.get(variable)
    if text is None:
        return None
    if options.get("action") == "store_true":
        return text.lower() not in ("", "0", "false", "no")
    convert = options.get("type", str)
    texts = text.split(";") if options.get("action") == "append" else [text]
    try:
        values = [convert(one) for one in texts]
    except (argparse.ArgumentTypeError, ValueError) as error:
        parser.error(f"{variable}={text}: {error}")
    return values if options.get("action") == "append" else values[0]


# ---- types


def name(text: str) -> str:
    """A job or machine name."""
    if not re.fullmatch(NAME_PATTERN.strip("^$"), text):
        raise argparse.ArgumentTypeError(
            f"a name is lower-case letters, digits and inner dashes, at most 63, got {text!r}"
        )
    return text


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return int(text)


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got {text!r}")
    return value


def duration(text: str) -> float:
    """Seconds of `90`, `90s`, `10m` or `2h`."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _SECONDS_IN else (text, "s")
    try:
        return seconds(number) * _SECONDS_IN[unit]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"expected a time above 0 like 90s, 10m or 2h, got {text!r}"
        ) from None


def label(text: str) -> str:
    """`zone=a`: a key and a value without spaces and commas."""
    if not re.fullmatch(r"[A-Za-z0-9][-._/A-Za-z0-9]*=[-._/A-Za-z0-9]+", text):
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE like rack=r12, got {text!r}")
    return text


def bus_url(text: str) -> str:
    """`nats://[TOKEN@]HOST[:PORT]`, also tls, ws and wss; the scheme may be left out."""
    parts = urlsplit(text if "://" in text else f"nats://{text}")
    try:
        fits = parts.scheme in ("nats", "tls", "ws", "wss") and parts.hostname and parts.port != 0
    except ValueError:  # the port is no number, or too high
        fits = False
    if not fits:
        raise argparse.ArgumentTypeError(f"expected nats://HOST:PORT, got {text!r}")
    return text


def port_range(text: str) -> str:
    first, dash, last = text.partition("-")
    ports = first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 65536
    if not (dash and ports):
        raise argparse.ArgumentTypeError(f"expected FIRST-LAST like 30000-30999, got {text!r}")
    return text


def fault(text: str) -> str:
    """`kill:rank=1,step=20`, checked here and read again where it fires; `@FILE` is read there."""
    if text.startswith("@"):
        return text
    try:
        Fault.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def output_file(text: str) -> Path:
    """A file that can be written when the time comes: said now, not after the training."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, {text} is a folder: add a name")
    output_folder(str(path.parent))
    return path


def output_folder(text: str) -> Path:
    """A folder that is there or can be made."""
    path = Path(text)
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder, {there} is a file: choose another")
    if not os.access(there, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"nothing may be written in {there}: choose another")
    return path
