"""Groups that a script makes itself, in a job that loses a rank."""

from pathlib import Path

import pytest
from tests.integration.command import run

SCRIPT = Path(__file__).with_name("scripts") / "grouped.py"


@pytest.mark.full
@pytest.mark.concurrent
def test_groups_of_the_script_go_on_with_a_new_member_and_none_is_made_after_set_up(
    tmp_path: Path,
) -> None:
    size = ("--nproc-per-node", "4", "--standbys", "1")
    outcome = run(tmp_path, *size, "--fault", "kill:rank=1,step=10", str(SCRIPT))
    assert outcome.said("incident g2 (crash, completed)") == 1
    for rank in range(4):
        leader = 2 if rank == 2 else 3
        assert outcome.said(f"rank {rank} saw 15 [0, 1, 2, 3] {leader}\n") == 1
    assert outcome.said("expected process groups to be made in set-up, got one of ranks [0, 1]")
