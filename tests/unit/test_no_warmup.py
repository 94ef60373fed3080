"""`trainmover run --no-warmup`: standbys wait for a rank without running the script."""

from pathlib import Path

import pytest
from tests.unit.planner_histories import ASSIGNED, J, registered, submitted

from trainmover.cli import start
from trainmover.cli.main import parser
from trainmover.cli.options import read
from trainmover.schemas.commands import StandBy
from trainmover.schemas.events import RankReady
from trainmover.schemas.recorded import Recorded
from trainmover.services.contract import Ask, Inputs
from trainmover.services.mover.decide import SERVICE


@pytest.mark.parametrize(("argv", "warm_up"), [((), True), (("--no-warmup",), False)])
def test_the_flag_goes_into_the_submission(
    tmp_path: Path, argv: tuple[str, ...], warm_up: bool
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    options = read(parser().parse_args(["run", *argv, str(script)]), "ab" * 32)
    assert start.wanted(options).warm_up == warm_up


@pytest.mark.parametrize(("warm_up", "told"), [(True, {"d"}), (False, set())])
def test_only_with_warm_up_is_anybody_told_to_stand_by(warm_up: bool, told: set[str]) -> None:
    job = submitted("dp=3").model_copy(update={"warm_up": warm_up})
    workers = [registered(worker, index) for index, worker in enumerate("abcd")]
    ready = [
        RankReady(**J, worker=worker, rank=rank, generation=1, shards={})
        for rank, worker in enumerate("abc")
    ]
    state = SERVICE.initial
    for seq, event in enumerate([job, *workers, ASSIGNED, *ready], 1):
        state = SERVICE.evolve(state, Recorded(seq, float(seq), event))
    said = SERVICE.decide(state, Inputs(now_s=20.0, up_since_s=0.0, answers={}))
    asked = {o.worker for o in said if isinstance(o, Ask) and isinstance(o.command, StandBy)}
    assert asked == told
