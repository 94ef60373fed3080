"""Which modules a script will import, and importing them ahead of it."""

import ast
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path


def top_level(source: str, package: str = "") -> tuple[str, ...]:
    """Modules that the import statements at the top of a script name, in order, each once.

    `from a import b` gives `a` and `a.b`: b may be a module. Relative imports are resolved
    against `package`. A source that does not parse names none: running it will say why.
    """
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return ()
    names = (name for statement in body for name in _named(statement, package))
    return tuple(dict.fromkeys(name for name in names if name.partition(".")[0] != "__future__"))


def _named(statement: ast.stmt, package: str) -> Iterator[str]:
    match statement:
        case ast.Import(names=aliases):
            yield from (alias.name for alias in aliases)
        case ast.ImportFrom(module=module, names=aliases, level=level):
            relative = "." * level + (module or "")
            if level and not package:
                return
            base = importlib.util.resolve_name(relative, package) if level else relative
            yield base
            yield from (f"{base}.{alias.name}" for alias in aliases if alias.name != "*")
        case ast.Try(body=body, handlers=handlers, orelse=orelse):
            inner = [*body, *(s for handler in handlers for s in handler.body), *orelse]
            for one in inner:
                yield from _named(one, package)
        case _:
            return


def source_of(script: str, *, module: bool) -> tuple[str, str]:
    """Source text and package of a script or of a module as `python -m` finds it.

    Raises FileNotFoundError, with what was looked for, when there is none.
    """
    if not module:
        path = Path(script)
        if not path.is_file():
            raise FileNotFoundError(f"no script {script!r} in {os.getcwd()}")
        return path.read_text(errors="replace"), ""
    spec = _main_spec(script)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"no module {script!r} that `python -m` could run")
    return Path(spec.origin).read_text(errors="replace"), spec.parent or ""


def _main_spec(module: str) -> importlib.machinery.ModuleSpec | None:
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            return importlib.util.find_spec(f"{module}.__main__")
    except (ImportError, ValueError):
        return None
    return spec


def import_ahead(names: Iterable[str], num_threads: Callable[[], int]) -> str:
    """Import each module that can be; returns the first that left a second thread, or "".

    Failures are left to the script, which imports the same names where the error belongs.
    """
    culprit = ""
    for name in names:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit):
            continue
        finally:
            if not culprit and num_threads() > 1:
                culprit = name
    return culprit


def num_threads() -> int:
    """Threads of this process, those that no Python code knows of included. Linux, proc(5)."""
    return len(os.listdir("/proc/self/task"))
