"""A rank with a compiled model dies: the same bits, and the process that takes over has compiled
everything before."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.chaos.job import Job, assert_same

STEPS = 24
pytestmark = [
    pytest.mark.full,
    pytest.mark.concurrent,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a compiler"
    ),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the compilers of all jobs share, so that each graph is compiled to C++ once."""
    return tmp_path_factory.mktemp("inductor")


def job(folder: Path, cache: Path, *script: str) -> Job:
    return Job(
        folder,
        "compiled.py",
        script_args=(f"--steps={STEPS}", f"--folder={folder}", *script),
        variables={"TORCHINDUCTOR_CACHE_DIR": str(cache)},
    )


def graphs(folder: Path, pid: int) -> list[int]:
    """How many a process had compiled after each of its steps."""
    lines = [json.loads(line) for line in (folder / "graphs").read_text().splitlines()]
    return [line["graphs"] for line in lines if line["pid"] == pid]


@pytest.mark.parametrize(
    "script", [(), ("--rebindable",), ("--ddp-inside",)], ids=["again", "rebound", "ddp-inside"]
)
def test_a_promoted_standby_compiles_nothing_and_goes_on_with_the_same_bits(
    tmp_path: Path, cache: Path, script: tuple[str, ...]
) -> None:
    with job(tmp_path / "undisturbed", cache, *script) as run:
        undisturbed = run.finish(300)
    folder = tmp_path / "disturbed"
    with job(folder, cache, *script) as run:
        allowed, warm = 2, {}
        run.pace(allowed)
        for count, (rank, point) in enumerate([(1, "backward"), (0, "optimizer")], 1):
            run.wait_for("a parked standby", lambda: bool(run.parked()), 300)
            joiner = run.pid(run.parked()[0])
            warm[joiner] = graphs(folder, joiner)
            run.inject(f"kill:worker={run.assignment()[rank]},at={point}")
            allowed += 4
            run.pace(allowed)
            run.recovered(count)
        run.pace(STEPS + 1)
        finished = run.finish(300)
    for joiner, before in warm.items():
        after = graphs(folder, joiner)[len(before) :]
        assert before[-1] > 0
        assert set(after) == {before[-1]}, f"{before} graphs while it was warmed, then {after}"
    assert_same(finished, undisturbed)
