"""Fenced blocks of the documents, and which test runs each.

The line before a block names the test, or says why there is none:

    <!-- run: tests/integration/test_readme.py::test_the_script_of_the_readme_survives_a_kill -->
    <!-- not run: needs a cluster -->

A test gets its blocks by `run_by(its name)`, so that what the document says of it is true.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
SHOWN = ("text", "mermaid")
"""Languages of output, trees and diagrams: nothing that a reader could run."""

_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>run|not run): (?P<what>[^\n]+) -->\n)?"
    r"^(?P<fence>```+)(?P<language>[^\n]*)\n(?P<text>.*?)^(?P=fence)$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    document: Path
    line: int
    """Of its fence, from 1."""
    language: str
    text: str
    test: str | None
    """`file::function` that runs it."""
    reason: str | None
    """Why none does."""

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks() -> Iterator[Block]:
    for document in DOCUMENTS:
        text = document.read_text()
        for found in _BLOCK.finditer(text):
            yield Block(
                document,
                text.count("\n", 0, found.start("fence")) + 1,
                found["language"],
                found["text"],
                found["what"] if found["mark"] == "run" else None,
                found["what"] if found["mark"] == "not run" else None,
            )


def run_by(test: str) -> list[str]:
    """Texts of the blocks that name this function, in order. Fails if there is none."""
    found = [block.text for block in blocks() if (block.test or "").endswith(f"::{test}")]
    assert found, f"no document has a block that is run by {test}"
    return found
