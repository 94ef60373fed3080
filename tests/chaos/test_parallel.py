"""DDP, HSDP, tensor parallelism and pipelines of torch: a rank dies, and the end is the same."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.job import Finished, Job, assert_same
from tests.chaos.test_kills import IN_A_STEP, kill_at

STEPS = 32
LAYOUTS = {
    "ddp": "dp=4",
    "ddp-static": "dp=4",
    "ddp-unused": "dp=4",
    "hsdp": "dp_replicate=2,dp_shard=2",
    "tp": "dp=2,tp=2",
    "sp": "dp=2,tp=2",
    "gpipe": "pp=2,dp=2",
    "1f1b": "pp=2,dp=2",
}
"""In each of them every shard has a replica."""

Undisturbed = Callable[[str], Finished]

pytestmark = [pytest.mark.concurrent, pytest.mark.timeout(400)]


def parallel(
    folder: Path, parallelism: str, layout: str, *more: str, steps: int = STEPS, standbys: int = 1
) -> Job:
    """`more` are arguments of the script."""
    args = (f"--parallelism={parallelism}", f"--steps={steps}", f"--folder={folder}", *more)
    return Job(
        folder,
        "parallel.py",
        nproc=4,
        standbys=standbys,
        script_args=args,
        run_args=(f"--layout={layout}",),
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The same job left alone; run once for each parallelism."""
    known: dict[str, Finished] = {}

    def get(parallelism: str) -> Finished:
        if parallelism not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            with parallel(folder, parallelism, LAYOUTS[parallelism], standbys=0) as run:
                known[parallelism] = run.finish()
        return known[parallelism]

    return get


def killed(folder: Path, parallelism: str, kills: tuple[tuple[int, str], ...]) -> Finished:
    with parallel(folder, parallelism, LAYOUTS[parallelism], standbys=min(2, len(kills))) as run:
        kill_at(run, kills)
        run.pace(STEPS + 1)
        return run.finish()


def test_two_kills_of_a_sharded_and_replicated_job_change_nothing(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    finished = killed(tmp_path, "hsdp", ((3, "forward"), (0, "backward")))
    assert_same(finished, undisturbed("hsdp"))


@pytest.mark.full
@pytest.mark.parametrize("rank", range(4))
def test_a_kill_of_every_rank_of_a_sharded_job_at_every_point_changes_nothing(
    tmp_path: Path, undisturbed: Undisturbed, rank: int
) -> None:
    finished = killed(tmp_path, "hsdp", tuple((rank, point) for point in IN_A_STEP))
    assert_same(finished, undisturbed("hsdp"))


@pytest.mark.full
@pytest.mark.parametrize("parallelism", sorted(LAYOUTS.keys() - {"hsdp"}))
def test_kills_of_every_rank_under_every_parallelism_change_nothing(
    tmp_path: Path, undisturbed: Undisturbed, parallelism: str
) -> None:
    kills = ((0, "backward"), (3, "frame"), (1, "vote"), (2, "forward"), (3, "optimizer"))
    assert_same(killed(tmp_path, parallelism, kills), undisturbed(parallelism))


@pytest.mark.full
def test_objects_that_no_single_rank_holds_together_come_from_those_that_hold_each(
    tmp_path: Path,
) -> None:
    each = ("hsdp:dp_replicate=2,dp_shard=2:dp_shard", "gpipe:pp=2,dp=2:dp_replicate")
    layout, ends = LAYOUTS["hsdp"], []
    for name, victims in (("undisturbed", ()), ("killed", (1, 2))):
        more = ("--each", *each)
        with parallel(tmp_path / name, "", layout, *more, standbys=2 * bool(victims)) as run:
            kill_at(run, tuple((rank, "forward") for rank in victims))
            run.pace(STEPS + 1)
            ends.append(run.finish())
        switched = run.of("migration.switched")
    assert_same(ends[1], ends[0])
    for victim, event in zip((1, 2), switched, strict=True):
        (one,) = event["restored"]
        workers = {m["worker"]: m["rank"] for m in run.of("layout.assigned")[0]["members"]}
        for plan in run.of("migration.planned"):
            workers |= {m["worker"]: m["rank"] for m in plan["members"]}
        gave = {workers[worker] for worker, count in one["donors"].items() if count}
        assert {(victim + 2) % 4, victim ^ 1} <= gave


# ---- nobody else holds the shard

NOT_HELD = [
    ("fsdp", "dp_shard=4", "dp_shard=2: fsdp, fsdp_optimizer, fsdp_scheduler"),
    ("tp", "tp=4", "tp=2: tp, tp_optimizer, tp_scheduler"),
    ("gpipe", "pp=4", "pp=2: gpipe, gpipe_optimizer, gpipe_scheduler"),
]


@pytest.mark.parametrize(
    ("parallelism", "layout", "shard"),
    [NOT_HELD[0], *(pytest.param(*case, marks=pytest.mark.full) for case in NOT_HELD[1:])],
)
def test_a_kill_of_the_only_holder_of_a_shard_ends_the_job_within_5_s(
    tmp_path: Path, parallelism: str, layout: str, shard: str
) -> None:
    with parallel(tmp_path, parallelism, layout) as run:
        assert_lost(run, shard)


@pytest.mark.full
def test_a_shard_that_only_the_script_declares_comes_from_no_rank_of_another(
    tmp_path: Path,
) -> None:
    with parallel(tmp_path, "", "dp=4", "--each", "fsdp:dp_shard=4:dp") as run:
        assert_lost(run, "dp=2: fsdp, fsdp_optimizer, fsdp_scheduler")


def assert_lost(run: Job, shard: str) -> None:
    """Rank 2 is killed, and the job says in time what was lost."""
    run.pace(3)
    run.wait_for("four ranks", lambda: len(run.of("rank.ready")) == 4)
    worker = run.assignment()[2]
    run.inject(f"kill:worker={worker},step=3,at=backward")
    run.pace(STEPS)
    finished = run.finish()
    assert finished.code == 4, finished.output
    reason = finished.report["end_reason"]
    assert reason == (
        f"rank 2 held every copy of the state ({shard}) and failed: {worker} was killed by "
        "SIGKILL; no holder of this shard is left; in-memory snapshots are not in this version"
    )
    assert reason in finished.output
    happened = {e["type"]: e["at_s"] for e in reversed(finished.report["events"])}
    assert happened["job.failed"] - happened["worker.exited"] < 5  # the first exit: the death
