"""One standby for stages that differ: warm for each of them by what their ranks recorded."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.job import Finished, Job, assert_same
from tests.chaos.test_kills import kill_at

STEPS = 24
FIRST, MIDDLE, LAST = 0, 3, 4
"""A rank of each of three stages."""

pytestmark = [pytest.mark.concurrent, pytest.mark.timeout(300)]


def stages(folder: Path, num_stages: int = 3, steps: int = STEPS, standbys: int = 1) -> Job:
    """Stages that ask each other for the shapes of what they send, each on two ranks."""
    return Job(
        folder,
        "parallel.py",
        nproc=2 * num_stages,
        standbys=standbys,
        script_args=(
            "--parallelism=gpipe-unshaped",
            f"--steps={steps}",
            f"--folder={folder}",
        ),
        run_args=(f"--layout=pp={num_stages},dp=2",),
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Finished]:
    """The same job left alone, run once."""
    known: list[Finished] = []

    def get() -> Finished:
        if not known:
            with stages(tmp_path_factory.mktemp("undisturbed"), standbys=0) as run:
                known.append(run.finish())
        return known[0]

    return get


def test_a_standby_that_is_warm_by_a_tape_takes_over_a_stage_that_exchanges_shapes(
    tmp_path: Path,
) -> None:
    with stages(tmp_path / "undisturbed", 2, steps=6, standbys=0) as left_alone:
        expected = left_alone.finish()
    with stages(tmp_path, 2, steps=6) as run:
        kill_at(run, ((FIRST, "backward"),))  # it stays in the class of the last stage
        run.pace(7)
        finished = run.finish()
    warmed = [(e["role_class"], e["replayed"], e["resident"]) for e in run.of("standby.warmed")]
    assert warmed[:2] == [("first", True, False), ("last", True, True)]
    assert_same(finished, expected)


@pytest.mark.full
def test_one_standby_is_warm_for_every_stage_of_a_pipeline_that_exchanges_shapes(
    tmp_path: Path, undisturbed: Callable[[], Finished]
) -> None:
    with stages(tmp_path) as run:
        kill_at(run, ((FIRST, "backward"), (MIDDLE, "frame"), (LAST, "forward")))
        run.pace(STEPS + 1)
        finished = run.finish()
    first, second, third = (run.of("standby.warmed")[i : i + 3] for i in (0, 3, 6))
    for warmed in (first, second, third):
        assert [e["role_class"] for e in warmed] == ["first", "last", "middle"]
        assert [e["resident"] for e in warmed] == [False, False, True]
        assert len({e["worker"] for e in warmed}) == 1
        assert all(e["replayed"] for e in warmed)
    assert run.of("standby.mismatched") == []
    assert_same(finished, undisturbed())


@pytest.mark.full
def test_a_worker_that_starts_at_the_failure_uses_what_was_recorded(
    tmp_path: Path, undisturbed: Callable[[], Finished]
) -> None:
    with stages(tmp_path, standbys=0) as run:
        run.pace(3)
        run.wait_for("all ranks", lambda: run.happened("rank.ready", 6))
        run.inject(f"kill:worker={run.assignment()[MIDDLE]},at=forward")
        run.pace(STEPS + 1)
        finished = run.finish()
    assert run.of("standby.warmed") == run.of("standby.mismatched") == []
    assert_same(finished, undisturbed())


# ---- standbys that cannot be warm


def standing(folder: Path, standby: str, *more: str) -> Job:
    return Job(
        folder,
        "standing.py",
        standbys=1,
        script_args=("--steps=12", f"--folder={folder}", f"--standby={standby}", *more),
    )


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """That job with a standby that nothing disturbs."""
    with standing(tmp_path_factory.mktemp("fits"), "fits") as run:
        return run.finish()


@pytest.mark.full
def test_a_standby_that_does_something_else_stays_cold_and_takes_a_rank(
    tmp_path: Path, left_alone: Finished
) -> None:
    with standing(tmp_path, "differs") as run:
        run.pace(3)
        run.wait_for("both mismatches", lambda: run.happened("standby.mismatched", 2))
        run.inject(f"kill:worker={run.assignment()[1]},at=forward")
        run.pace(13)
        finished = run.finish()
    first, second = run.of("standby.mismatched")[:2]
    assert (first["role_class"], second["role_class"]) == ("even", "odd")
    assert first["worker"] == second["worker"] == run.assignment()[1]
    assert [e["bound"] for e in run.of("rank.ready")] == ["set-up", "set-up", "again"]
    assert first["reason"].startswith("group 0 (0-1#0), collective 0 of 0 in set-up: expected the")
    assert first["reason"].endswith("got all_reduce of torch.int64 [3]")
    assert run.of("standby.warmed") == []
    assert_same(finished, left_alone)


@pytest.mark.full
def test_a_tape_of_another_batch_shape_is_refused_and_the_cold_standby_takes_a_rank(
    tmp_path: Path, left_alone: Finished
) -> None:
    with standing(tmp_path, "waits") as run:
        (tmp_path / "hold").touch()  # the standby has no place to stand in before ranks are ready
        run.pace(3)
        run.wait_for("both ranks", lambda: run.happened("rank.ready", 2))
        (tmp_path / "rows").write_text("16")
        (tmp_path / "hold").unlink()
        run.wait_for("both mismatches", lambda: run.happened("standby.mismatched", 2))
        (tmp_path / "rows").write_text("8")
        run.inject(f"kill:worker={run.assignment()[1]},at=forward")
        run.pace(13)
        finished = run.finish()
    mismatched = run.of("standby.mismatched")[:2]
    assert [e["role_class"] for e in mismatched] == ["even", "odd"]
    assert {e["worker"] for e in mismatched} == {run.assignment()[1]}
    for event in mismatched:
        assert event["reason"].endswith(
            "in shadow step 0: expected all_gather of torch.float32 [8, 2], got all_gather of "
            "torch.float32 [16, 2]"
        )
    assert not [e for e in run.of("standby.warmed") if e["worker"] == mismatched[0]["worker"]]
    assert_same(finished, left_alone)


@pytest.mark.full
def test_a_tape_of_another_script_is_refused_and_the_standby_echoes(
    tmp_path: Path, left_alone: Finished
) -> None:
    with standing(tmp_path, "fits", "--foreign") as run:
        run.pace(3)
        run.wait_for("both warm-ups", lambda: run.happened("standby.warmed", 2))
        run.inject(f"kill:worker={run.assignment()[1]},at=forward")
        run.pace(13)
        finished = run.finish()
    assert all(e["tape"] and not e["replayed"] for e in run.of("standby.warmed"))
    [submitted] = run.of("job.submitted")
    reason = f"expected a tape of script {submitted['script_digest']}, got one of {'0' * 64}"
    assert "tape.unusable" in finished.output
    assert reason in finished.output
    assert run.of("standby.mismatched") == []
    assert_same(finished, left_alone)


@pytest.mark.full
@pytest.mark.parametrize(
    ("standby", "error"),
    [("raises", "RuntimeError"), ("hangs", "TimeoutError")],
)
def test_a_standby_that_never_gets_warm_ends_alone(
    tmp_path: Path, standby: str, error: str
) -> None:
    with standing(tmp_path, standby) as run:
        run.pace(3)
        run.wait_for("two ends of standbys", lambda: run.happened("worker.failed", 2))
        run.pace(13)
        finished = run.finish()
    assert finished.code == 0, finished.output
    exits = [e for exited in run.of("worker.exited") for e in exited["exits"] if e["error"]]
    assert {e["error"]["exception"] for e in exits} == {error}
    assert {e["code"] for e in exits} == {1}
    assert run.of("migration.planned") == []
