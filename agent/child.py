"""A fork of the warm process becomes a worker: environment, output, seeds, then the script."""

import atexit
import importlib
import io
import os
import random
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

from trainmover.agent.orders import Program


@dataclass(frozen=True, slots=True)
class Pipes:
    """File descriptors that the worker's output goes to."""

    stdout: int
    stderr: int


def become(program: Program, variables: Mapping[str, str], pipes: Pipes) -> NoReturn:
    """Run the program as `python script` would, and end this process with its exit code."""
    os.environ.update(variables)
    _restore_signals()
    _redirect(pipes)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    _seed_from_os()
    sys.argv = [program.script, *program.arguments]
    try:
        if program.module:
            runpy.run_module(program.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(program.script, run_name="__main__")
    except SystemExit as ended:
        _leave(_code(ended))
    except BaseException as error:
        error = error.with_traceback(_user_part(error.__traceback__))
        _hook()(type(error), error, error.__traceback__)
        _leave(1)
    _leave(0)


def _leave(code: int) -> NoReturn:
    """As the interpreter ends, and multiprocessing ends what it forks: threads are waited for, exit
    functions run, output is flushed. But objects are not taken apart: that touches, and so copies,
    every page that is shared with the warm process, 0.3 s of CPU where torch is imported."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # nobody reads it, or the script closed it
                stream.flush()
        os._exit(code & 0xFF)


def _code(ended: SystemExit) -> int:
    """What the interpreter makes of it: a text is an error that is shown."""
    if ended.code is None:
        return 0
    if isinstance(ended.code, int):
        return ended.code
    print(ended.code, file=sys.stderr)
    return 1


def exec_python(program: Program, environment: Mapping[str, str], pipes: Pipes) -> NoReturn:
    """Run the program in a fresh interpreter, in this process."""
    _restore_signals()
    _redirect(pipes)
    argv = [sys.executable, "-u", *program.argv]
    os.execve(sys.executable, argv, dict(environment))


def _redirect(pipes: Pipes) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (pipes.stdout, 1), (pipes.stderr, 2)):
        os.dup2(source, target)
        os.close(source)


def _restore_signals() -> None:
    """What an import may have installed in the warm process is not the script's."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _seed_from_os() -> None:
    """Two forks must not draw the same numbers; only what is imported already is seeded."""
    random.seed()
    if "numpy" in sys.modules:
        importlib.import_module("numpy").random.seed()
    if "torch" in sys.modules:
        importlib.import_module("torch").seed()


def _hook() -> Callable[[type[BaseException], BaseException, TracebackType | None], object]:
    """The script's own excepthook, but not torch's, which writes the rank before each line too."""
    of_torch = sys.excepthook.__module__.partition(".")[0] == "torch"
    return sys.__excepthook__ if of_torch else sys.excepthook


def _user_part(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this module and of runpy."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    at = traceback
    while at is not None and at.tb_frame.f_code.co_filename in ours:
        at = at.tb_next
    return at
