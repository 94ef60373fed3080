"""The documents say what the code does: tables, diagram, flags and links are compared with it."""

import argparse
import ast
import importlib
import inspect
import re
import shlex
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests import documents
from tests.documents import DOCUMENTS, ROOT, SHOWN, Block, run_by

import trainmover
from trainmover.cli import moves as moving
from trainmover.cli import options, reach, rehearse
from trainmover.cli.flags import REFUSED
from trainmover.cli.main import parser
from trainmover.cli.verdict import Verdict
from trainmover.runtime import commit
from trainmover.runtime.commit import Phase, Position, ProtocolError
from trainmover.runtime.context import Context
from trainmover.runtime.step import Step
from trainmover.schemas.events import EVENTS, ONCE_ONLY
from trainmover.schemas.export import COMMANDS
from trainmover.schemas.fault import KINDS, POINTS

if TYPE_CHECKING:
    from tests.unit.one_rank import OneRank

PROTOCOL, OPERATIONS = ROOT / "docs/protocol.md", ROOT / "docs/operations.md"
SCRIPT = ROOT / "docs/script.md"
ROOMS = ("agent", "bus", "cli", "runtime", "schemas", "services", "telemetry")


def rows(document: Path, first: str) -> list[list[str]]:
    """Cells of the one table whose first column is headed `first`."""
    lines = iter(document.read_text().splitlines())
    assert any(line.startswith(f"| {first} |") for line in lines), f"{document}: no table {first}"
    next(lines)
    found = []
    for line in lines:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def code(cell: str) -> str:
    """The first thing in backticks."""
    found = re.match(r"`([^`]+)`", cell)
    assert found, f"expected `code`, got {cell!r}"
    return found[1]


def blocks(document: Path, language: str) -> list[str]:
    found = (b for b in documents.blocks() if b.document == document)
    return [block.text for block in found if block.language == language]


def anchors(document: Path) -> set[str]:
    """Anchors of headings as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_of_a_document_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{document.name} points to {link}"
        assert not anchor or anchor in anchors(target), f"{document.name} points to {link}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_are_ascii(document: Path) -> None:
    assert document.read_text().isascii()


@pytest.mark.parametrize("room", ROOMS)
def test_pages_that_comments_name_exist(room: str) -> None:
    for source in (ROOT / room).rglob("*.py"):
        for page in re.findall(r"\b[a-z]+\.md\b", source.read_text()):
            found = [d for d in DOCUMENTS if d.name == page]
            assert found, f"{source} names {page}, which does not exist"


def test_every_design_page_is_listed() -> None:
    design = ROOT / "docs/design"
    listed = (design / "README.md").read_text()
    pages = {path.name for path in design.iterdir() if path.suffix in (".md", ".py")}
    assert {name for name in pages if f"({name})" not in listed} == {"README.md"}


def test_the_folders_in_the_readme_exist() -> None:
    tree = next(b for b in blocks(ROOT / "README.md", "text") if b.startswith("schemas/"))
    for line in tree.splitlines():
        assert (ROOT / line.split()[0]).is_dir(), line


def test_a_word_stands_once_in_the_glossary_and_in_order() -> None:
    words = [cells[0] for cells in rows(ROOT / "docs/glossary.md", "word")]
    assert words == sorted(set(words))


def commands() -> Iterator[tuple[str, list[str]]]:
    for document in DOCUMENTS:
        for block in blocks(document, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["trainmover"]:
                    yield f"{document.name}: {line}", words[1:]


@pytest.mark.parametrize(("where", "words"), tuple(commands()), ids=lambda value: str(value)[:40])
def test_commands_in_documents_are_understood(where: str, words: list[str]) -> None:
    parser().parse_args(words)


def flags_of(add_to: Callable[[argparse.ArgumentParser], None]) -> dict[str, Any]:
    """Flag in its first spelling -> default, of a command."""
    run = argparse.ArgumentParser()
    add_to(run)
    refused = {name for flag in REFUSED for name in (flag, "--" + flag[2:].replace("-", "_"))}
    shown = [a for a in run._actions if a.help != argparse.SUPPRESS and a.option_strings]
    return {
        a.option_strings[0]: a.default for a in shown if a.option_strings[0] not in {"-h", *refused}
    }


def assert_defaults(told: dict[str, str], flags: dict[str, Any]) -> None:
    for name, default in told.items():
        if default.isdecimal() or default.count(".") == 3:
            assert str(flags[name]) in (default, f"{default}.0"), name
        else:
            assert flags[name] in (None, False, []), name


def test_the_table_of_flags_is_that_of_run() -> None:
    told = {code(cells[0]).split()[0]: cells[1] for cells in rows(OPERATIONS, "flag")}
    flags = flags_of(options.add_to)
    assert told.keys() == flags.keys()
    assert_defaults(told, flags)


def test_the_table_of_rehearsal_flags_has_what_run_does_not_have_or_has_differently() -> None:
    told = {code(cells[0]).split()[0]: cells[1] for cells in rows(OPERATIONS, "rehearsal flag")}
    flags, of_run = flags_of(rehearse.add_to), flags_of(options.add_to)
    same = {name for name in flags.keys() & of_run.keys() if flags[name] == of_run[name]}
    assert told.keys() == flags.keys() - same
    assert all(f"`{name}`" in OPERATIONS.read_text() for name in same)
    assert_defaults(told, flags)


@pytest.mark.parametrize("command", ["migrate", "drain"])
def test_the_table_of_flags_that_move_is_that_of_the_command(command: str) -> None:
    told = {code(cells[0]).split()[0]: cells[1] for cells in rows(OPERATIONS, f"{command} flag")}
    flags = flags_of(moving.add_migrate if command == "migrate" else moving.add_drain)
    assert told.keys() == flags.keys() - flags_of(reach.add_to).keys()
    assert {float(default) for default in told.values() if default.isdecimal()} == {
        flags["--timeout"]
    }


def test_the_table_of_verdicts_is_that_of_the_code() -> None:
    assert [cells[0] for cells in rows(OPERATIONS, "verdict")] == list(Verdict)


def test_every_refused_flag_is_named() -> None:
    text = OPERATIONS.read_text()
    assert all(f"`{flag}`" in text for flag in REFUSED)


def test_the_exit_codes_are_those_of_the_help() -> None:
    told = {int(cells[0]): cells[1] for cells in rows(OPERATIONS, "code")}
    text = " ".join(options.EXAMPLE.partition("exit codes: ")[2].split())
    helped = {int(n): words for n, words in re.findall(r"(\d+) ([^,]+)(?:, |$)", text)}
    assert told == helped


def test_the_table_of_events_is_that_of_the_schemas() -> None:
    table = rows(PROTOCOL, "event")
    assert [code(cells[0]) for cells in table if cells[2] == "yes"] == list(ONCE_ONLY)
    assert sorted(code(cells[0]) for cells in table) == sorted(EVENTS)
    manual = rows(OPERATIONS, "event")
    assert [code(cells[0]) for cells in manual] == list(EVENTS)
    unsaid = {code(cells[0]) for cells in table if cells[1] == "nobody yet"}
    assert {code(cells[0]) for cells in manual if cells[1] == "not said yet"} == unsaid
    assert all(cells[1] and (cells[2] or code(cells[0]) in unsaid) for cells in manual)


def test_events_that_nobody_says_are_marked_and_the_others_are_said() -> None:
    sources = [
        p.read_text()
        for room in ("agent", "cli", "runtime", "services")
        for p in (ROOT / room).rglob("*.py")
    ]
    for event, who, *_ in rows(PROTOCOL, "event"):
        name = EVENTS[code(event)].__name__
        said = any(
            re.search(rf"(?<!case ){name}\((?!\))", s) or f"say({name}" in re.sub(r"\s", "", s)
            for s in sources
        )
        assert said is (who != "nobody yet"), event


def test_the_table_of_commands_is_that_of_the_schemas() -> None:
    assert {code(cells[0]) for cells in rows(PROTOCOL, "command")} == COMMANDS.keys()


def test_every_limit_has_the_value_of_the_code() -> None:
    for what, value, constant in rows(OPERATIONS, "what"):
        parts = code(constant).split(".")
        depth = 3 if parts[0] == "services" else 2
        found: Any = importlib.import_module("trainmover." + ".".join(parts[:depth]))
        for part in parts[depth:]:
            found = getattr(found, part)
        assert float(value) == found, what


def test_the_tables_of_faults_are_those_of_the_schemas() -> None:
    assert [code(cells[0]) for cells in rows(OPERATIONS, "kind")] == list(KINDS)
    assert [code(cells[0]) for cells in rows(OPERATIONS, "point")] == list(POINTS)


# ---- the page for who writes the script


def public(made: type) -> set[str]:
    """Its methods and properties, and what its __init__ gives a name to."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(made)))
    given = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    return {name for name in given | set(vars(made)) if not name.startswith("_")}


@pytest.mark.parametrize(("owner", "made"), [("ctx", Context), ("step", Step)])
def test_every_public_name_of_a_script_has_a_row(owner: str, made: type) -> None:
    told = {name for cells in rows(SCRIPT, "name") for name in re.findall(r"`([\w.]+)", cells[0])}
    assert {name for name in told if name.startswith(f"{owner}.")} == {
        f"{owner}.{name}" for name in public(made)
    }
    assert {f"trainmover.{name}" for name in trainmover.__all__} <= told


def test_python_in_documents_compiles() -> None:
    for document in DOCUMENTS:
        for block in blocks(document, "python"):
            compile(block, document.name, "exec")


@pytest.mark.filterwarnings("ignore:Detected call of")  # shadow steps never step
def test_the_whole_script_of_the_page_runs(
    one: "OneRank", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script: dict[str, Any] = {"__name__": "script"}
    (text,) = run_by("test_the_whole_script_of_the_page_runs")
    exec(text, script)
    performance = one.train(script["train"])
    assert performance.finished
    assert performance.tracked.vars == {"samples": 40 * 16}
    assert performance.averages.keys() == {"valid"}
    assert [path.name for path in tmp_path.glob("model*")] == ["model.pt"]


def test_the_model_of_the_commit_runs() -> None:
    (block,) = run_by("test_the_model_of_the_commit_runs")
    command = ["bash", "-euc", block.replace("python3 ", f"{sys.executable} ")]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=100)
    assert ended.returncode == 0
    assert "0 scenario(s) broken" in ended.stdout


def rules_of_the_model() -> set[str]:
    tree = ast.parse((ROOT / "docs/design/check_commit.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ALLRULES":
            return set(ast.literal_eval(node.value))
    raise AssertionError("check_commit.py has no ALLRULES")


def test_every_rule_of_the_model_stands_by_its_name_where_the_table_says() -> None:
    table = rows(PROTOCOL, "rule")
    assert {cells[0] for cells in table} == rules_of_the_model()
    for rule, _, where in table:
        for link in re.findall(r"\]\(([^)]+)\)", where):
            text = (PROTOCOL.parent / link).read_text()
            assert re.search(rf"\b{rule}\b", text), f"{rule} does not stand in {link}"


# ---- what a reader can run

NOT_RUN = {
    "a piece of a script": 6,
    "installs torchft and takes a quarter of an hour or more": 1,
    "takes minutes on a quiet machine": 7,
    "make test is what runs the tests": 1,
    "needs Go and github.com/nats-io/nats.go": 1,
    "needs a package index and a collector": 1,
    "needs a package index; make installs the same": 1,
    "needs the nats command": 1,
}
"""Reason -> number of blocks that no test runs."""

RUNNABLE = [block for block in documents.blocks() if block.language not in SHOWN]


@pytest.mark.parametrize("block", RUNNABLE, ids=str)
def test_a_block_is_run_by_the_test_it_names_or_says_why_not(block: Block) -> None:
    assert block.test or block.reason, (
        f"{block}: expected `<!-- run: file::test -->`, whose test calls run_by, or"
        " `<!-- not run: reason -->` on the line before it"
    )
    if block.test:
        file, _, test = block.test.partition("::")
        source = (ROOT / file).read_text()
        assert f"def {test}(" in source, f"{block}: {file} has no such test"
        assert f'run_by("{test}")' in source, f"{block}: {file} does not take its block"


def test_the_blocks_that_no_test_runs_are_counted() -> None:
    assert Counter(block.reason for block in RUNNABLE if block.reason) == NOT_RUN


def test_every_fence_and_every_mark_belongs_to_a_block() -> None:
    text = "\n".join(document.read_text() for document in DOCUMENTS)
    found = list(documents.blocks())
    assert len(re.findall(r"^\s*(?:```|~~~)", text, re.M)) == 2 * len(found)
    marked = [block for block in found if block.test or block.reason]
    assert len(re.findall(r"<!-- (?:not )?run:", text)) == len(marked)


@pytest.mark.parametrize("block", [b for b in RUNNABLE if b.language == "sh"], ids=str)
def test_shell_in_documents_parses(block: Block) -> None:
    subprocess.run(["bash", "-n"], input=block.text, text=True, check=True, timeout=30)


# ---- the diagram of where a worker stands


def moves(p: Position) -> Iterator[Callable[[], Position | None]]:
    """Everything that may be done to a worker at this position, right or refused."""
    g, target = p.promised, p.committed
    yield partial(commit.gathered, p)
    yield partial(commit.voted, p)
    yield partial(commit.failed, p)
    yield partial(commit.keep, p, p.generation, 1, target + 2)
    yield partial(commit.collect, p, g + 1)
    yield partial(commit.obey, p, g, target)
    yield partial(commit.obey, p, g, target + 1)
    yield partial(commit.restored, p, g, target)
    yield partial(commit.freeze, p, p.generation + 1)
    yield partial(commit.thaw, p, p.generation + 1)
    for yes in (True, False):
        for freeze in (0, p.generation + 1):
            yield partial(commit.result, p, p.generation, target, yes, freeze)
        yield partial(commit.resume, p, g, target, last=yes)
        yield partial(commit.applied, p, poisoned=False, last=yes)
        yield partial(commit.applied, p, poisoned=True, last=yes)


def transitions(max_generation: int = 3, max_steps: int = 2) -> set[tuple[str, str]]:
    """Every change of phase that can be reached from a standby and from generation 1."""
    found: set[tuple[str, str]] = set()
    todo = [Position(), Position(generation=1, phase=Phase.COMPUTING, promised=1)]
    seen: set[str] = set()
    while todo:
        before = todo.pop()
        beyond = before.promised > max_generation or before.committed > max_steps
        if beyond or repr(before) in seen:
            continue
        seen.add(repr(before))
        for move in moves(before):
            try:
                after = move()
            except ProtocolError:
                continue
            if after is not None:
                todo.append(after)
                if after.phase is not before.phase:
                    found.add((before.phase.value, after.phase.value))
    return found


def test_the_diagram_of_phases_is_that_of_the_code() -> None:
    (diagram,) = blocks(PROTOCOL, "mermaid")
    drawn = set(re.findall(r"^ +(\w+) --> (\w+)", diagram, re.M))
    assert drawn == transitions()
