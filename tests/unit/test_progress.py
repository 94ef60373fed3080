"""What a person sees of a job where output is no terminal."""

import asyncio

import pytest

from trainmover.cli.console import Console
from trainmover.cli.progress import Progress
from trainmover.schemas.events import JobStalled, MigrationCompleted, MigrationPlanned
from trainmover.schemas.local import Beat, Telemetry
from trainmover.schemas.recorded import Recorded

STALLED = JobStalled(
    job="j", run="r", generation=1, reason="no standby is free", unblocked_by="a new worker"
)
PLANNED = MigrationPlanned(
    job="j",
    run="r",
    generation=2,
    incident="g2",
    kind="relink",
    replacements=(),
    members=(),
    reason="a link broke",
)
COMPLETED = MigrationCompleted(
    job="j", run="r", generation=2, incident="g2", committed=8, normal_step_s=0.2
)


def beat(committed: int, phase: str = "step", step_s: float = 0.1) -> Telemetry:
    one = Beat(
        worker="m-w0",
        rank=0,
        phase=phase,
        committed=committed,
        step_s=step_s,
        numbers={"accuracy": 0.5, "loss": 2.3141},
    )
    return Telemetry(job="j", run="r", machine="m", interval_s=0.5, workers=(one,))


async def test_steps_are_told_at_most_once_a_second_with_the_loss_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = Progress(Console())
    for committed in (0, 1, 2, 3):
        await progress.hear(beat(committed))
    assert capsys.readouterr().err == "trainmover: step 1 loss 2.314 accuracy 0.5\n"


async def test_a_standby_that_stands_in_for_a_rank_is_no_progress(
    capsys: pytest.CaptureFixture[str],
) -> None:
    await Progress(Console()).hear(beat(5, phase="standby"))
    assert capsys.readouterr().err == ""


def test_what_holds_the_job_up_is_told_with_what_would_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Progress(Console()).see(Recorded(1, 1.0, STALLED))
    assert "no standby is free; unblocked by: a new worker" in capsys.readouterr().err


@pytest.mark.parametrize(("columns", "drawn"), [(100, True), (80, False)])
def test_an_incident_ends_with_its_timeline_where_there_is_room_for_it(
    columns: int,
    drawn: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    progress = Progress(Console())
    progress.see(Recorded(1, 1.0, PLANNED))
    progress.see(Recorded(2, 3.0, COMPLETED))
    said = capsys.readouterr().err
    assert "trainmover:   downtime 1800 ms since plan (less one step of 200 ms)" in said
    assert ("trainmover:   mover" in said) is drawn
    lines = [line for line in said.splitlines() if "migration.planned" not in line]
    assert max(map(len, lines)) <= columns


def test_after_an_interrupt_nothing_more_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(Console())
    progress.hush()
    progress.see(Recorded(1, 1.0, STALLED))
    assert capsys.readouterr().err == ""
    assert len(progress.records) == 1


async def test_a_person_is_reminded_of_a_stall_until_it_is_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainmover.cli.progress.REMIND_EVERY_S", 0.01)
    progress = Progress(Console())
    reminder = asyncio.create_task(progress.remind())
    progress.see(Recorded(1, 0.0, STALLED))
    said = ""
    async with asyncio.timeout(5):
        while said.count("still stalled: no standby is free; unblocked by: a new worker") < 2:
            await asyncio.sleep(0.01)
            said += capsys.readouterr().err
    progress.see(Recorded(2, 1.0, PLANNED))
    capsys.readouterr()
    await asyncio.sleep(0.05)
    reminder.cancel()
    assert "stalled" not in capsys.readouterr().err
