"""The jobs that are compared, and the runs of them."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from console import say
from measure import DidNot
from measuring import Measured, Move
from running import Job, Promoted, Relaunched

EMPTY = "--empty-cache"


def start(case: str, num_ranks: int, folder: Path, cache: Path) -> Job:
    """`cache` is what the compilers of all processes share, but for what is told otherwise."""
    if case == "restart":
        return Relaunched(folder, cache, num_ranks)
    flags = () if case.startswith(("warm", "planned")) else ("--no-warmup",)
    script = {
        "warm-rebound": ("--rebindable",),
        "cold": (EMPTY,),
        "direct": (EMPTY, "--links-anew"),
    }.get(case, ())
    return Promoted(folder, cache, num_ranks, flags, script)


def run(
    case: str, num_ranks: int, count: int, folder: Path, cache: Path, planned: int = 0
) -> list[Move]:
    """A job whose rank is killed `count` times, then moved `planned` times without a fault.

    Blocks. What was found before something failed is kept; says what did.
    """
    folder.mkdir(parents=True)
    found: list[Move] = []
    job = start(case, num_ranks, folder, cache)
    try:
        measured = Measured(case, job, folder)
        for index in range(count + planned):
            move = measured.killed() if index < count else measured.migrated()
            found.append(move)
            say(
                f"  {'moved' if move.planned else 'killed'}: {move.downtime_s:.2f} s, first step "
                f"{move.first_block_s:.3f} s ({move.normal_block_s:.3f}), {move.num_graphs} graphs"
            )
    except DidNot as error:
        say(f"  {case}: {error}; its output is in {folder}")
    finally:
        job.stop()
    return found


def write(path: Path, found: Mapping[str, Any], moves: Sequence[Move], titles: Any) -> None:
    document = {
        "machine": {"cores": os.cpu_count(), "system": platform.platform()},
        "versions": {
            "python": platform.python_version(),
            "torch": metadata.version("torch"),
            "trainmover": metadata.version("trainmover"),
        },
        "cases": {case: {"title": titles[case], **of} for case, of in found.items()},
        "moves": [asdict(move) for move in moves],
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
