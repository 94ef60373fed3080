"""What the report of a job says, and what is said of files that are none."""

import json
from pathlib import Path

import pytest
from tests.unit.incident_streams import (
    CRASH,
    EPOCH,
    JOB,
    MOVE,
    MOVE_DROPPED,
    MOVE_OPEN,
    OPEN,
    completed,
    failed,
    planned,
    started,
    submitted,
)

from trainmover.cli import main
from trainmover.cli.report import VERSION, Report, exit_code_of, report, summary
from trainmover.cli.reporting import write
from trainmover.schemas.base import Event
from trainmover.schemas.events import JobCompleted, JobFailed, StandbyWarmed
from trainmover.schemas.recorded import Recorded


def told(*timed: tuple[float, Event], exit_code: int | None = 0, now: float = 0.0) -> Report:
    records = [Recorded(i, EPOCH + at, event) for i, (at, event) in enumerate(timed, 1)]
    return report(records, job="j", run="r1", layout="dp=4", exit_code=exit_code, now=now)


def story(records: list[Recorded]) -> list[tuple[float, Event]]:
    return [(r.time_s - EPOCH, r.event) for r in records]


COMPLETED = JobCompleted(**JOB, completed_steps=200, state_digest="ab" * 32)
FAILED = JobFailed(**JOB, reason="no rank holds the shard", exit_code=4)
BEGIN = ((-20.0, submitted()), (-10.0, started()))


def test_goodput_is_what_interruptions_left_of_the_time_since_the_start() -> None:
    made = told(*BEGIN, *story(CRASH), (10.0, COMPLETED))
    assert made.wall_s == pytest.approx(20)
    assert made.lost_s == pytest.approx(0.5)
    assert made.goodput == pytest.approx(1 - 0.5 / 20)
    assert (made.incidents_by_kind, made.standbys_used) == ({"crash": 1}, 1)
    assert [f.words for f in made.faults_injected] == ["kill m-w1 in step 7"]
    assert (made.script_digest, made.submitted) == ("9f86d081884c7d65", 80.0)


def test_an_interruption_without_an_end_takes_time_until_now() -> None:
    made = told(*BEGIN, *story(OPEN), exit_code=None, now=EPOCH + 5)
    assert made.lost_s == pytest.approx(5)
    assert made.goodput == pytest.approx(1 - 5 / 15)


def test_a_move_costs_from_the_freeze_on_and_one_that_is_not_decided_nothing() -> None:
    moved = told(*BEGIN, *story(MOVE), (10.0, COMPLETED))
    assert moved.lost_s == pytest.approx(0.3)
    assert (moved.incidents_by_kind, moved.standbys_used) == ({"planned": 1}, 1)
    dropped = told(*BEGIN, *story(MOVE_DROPPED), (10.0, COMPLETED))
    assert (dropped.lost_s, dropped.goodput, dropped.standbys_used) == (0.0, 1.0, 0)
    assert told(*BEGIN, *story(MOVE_OPEN), exit_code=None, now=EPOCH + 99).lost_s == 0.0


def test_an_interruption_before_the_start_costs_no_goodput() -> None:
    early = ((0.0, failed(first_evidence=0)), (0.1, planned()), (0.5, completed()))
    made = told((-20, submitted()), *early, (1.0, started()), (11.0, COMPLETED))
    assert (made.lost_s, made.goodput) == (0.0, 1.0)
    assert len(made.incidents) == 1


def test_a_job_that_did_not_start_has_neither_wall_time_nor_goodput() -> None:
    made = told((0.0, submitted()), (5.0, FAILED), exit_code=4)
    assert (made.wall_s, made.goodput) == (None, None)
    assert made.end_reason == "no rank holds the shard"
    assert dict(summary(made))["outcome"] == "failed (4), no rank holds the shard"


def test_another_run_of_the_same_name_is_not_told_of() -> None:
    other = StandbyWarmed(job="j", run="r0", worker="m-w1", rank=0, warm_s=1)
    assert [event.type for event in told((-30, other), *BEGIN).events] == [
        "job.submitted",
        "job.started",
    ]


def test_the_exit_code_of_a_job_on_a_bus_is_what_its_stream_says() -> None:
    assert exit_code_of([Recorded(1, 1.0, COMPLETED)]) == 0
    assert exit_code_of([Recorded(1, 1.0, FAILED)]) == 4
    assert exit_code_of([Recorded(1, 1.0, started())]) is None


# ---- files


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "new" / "report.json"
    write(told(*BEGIN, *story(CRASH), (10.0, COMPLETED)), path)
    return path


def test_a_file_is_told_as_text_and_as_itself(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["report", str(file)]) == 0
    said = capsys.readouterr().out
    assert "outcome           completed, 200 steps" in said
    assert "incident g2 (crash, completed): rank 1: m-w1 -> m-w9" in said
    assert main.main(["report", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(file.read_text())


def test_a_run_writes_a_page_where_the_name_ends_so(tmp_path: Path) -> None:
    write(told(*BEGIN), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_a_run_that_is_asked_for_a_picture_says_how_to_make_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        main.main(["run", "--report", "x.png", "train.py"])
    assert end.value.code == 2
    assert "trainmover report FILE.json --png x.png" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is no report: expected the JSON that"),
        ("\udcff\x00", "is no report: expected the JSON that"),
        ("[1, 2]", "is no report: expected the JSON that"),
        ('{"completed_steps": 3}', "wrote: job: Field required"),
        (f'{{"version": {VERSION + 1}}}', f"of version {VERSION + 1}, this trainmover reads up to"),
    ],
)
def test_a_file_that_is_no_report_is_refused_with_what_was_expected(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_text(content, errors="surrogateescape")
    assert main.main(["report", str(path)]) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["report", "/nowhere/report.json"]) == 2
    assert "/nowhere/report.json: No such file or directory" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in ("--html", "--png"):
        with pytest.raises(SystemExit) as end:
            main.main(["report", str(file), flag, str(file / "x")])
        assert end.value.code == 2
        assert f"{flag}: expected a folder, {file} is a file" in capsys.readouterr().err


def test_a_folder_that_is_missing_is_made(file: Path, tmp_path: Path) -> None:
    for flag, name in (("--html", "x.html"), ("--png", "x.png")):
        path = tmp_path / name[-3:] / name
        assert main.main(["report", str(file), flag, str(path)]) == 0
        assert path.stat().st_size


def test_a_file_counts_more_than_a_job_of_the_environment(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINMOVER_BUS", "nats://127.0.0.1:1")
    monkeypatch.setenv("TRAINMOVER_JOB", "another")
    assert main.main(["report", str(file)]) == 0
    assert "completed, 200 steps" in capsys.readouterr().out
