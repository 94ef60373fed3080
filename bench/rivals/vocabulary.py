"""An expensive set-up, about a second: counts the words of Python's standard library."""

import re
import sysconfig
from collections import Counter
from pathlib import Path


def vocabulary() -> int:
    """How many there are."""
    words: Counter[str] = Counter()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        words.update(re.findall(r"\w+", path.read_text(errors="replace")))
    return len(words)
