"""Machines and workers are told to go: ranks move in time, nothing is done twice, equal bits."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.job import Bus, Finished, Job, assert_each_decision_once, assert_same
from tests.chaos.test_own_parts import ended
from tests.chaos.test_planned import code_of, phase_of
from tests.documents import run_by

STEPS = 60
READY_S = 90.0

pytestmark = [pytest.mark.concurrent, pytest.mark.timeout(400)]


def job(folder: Path, *more: str, nproc: int = 2, standbys: int = 0) -> Job:
    args = (f"--steps={STEPS}", f"--folder={folder}")
    return Job(
        folder, "everything.py", nproc=nproc, standbys=standbys, script_args=args, run_args=more
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    with job(tmp_path_factory.mktemp("undisturbed")) as run:
        return run.finish()


@contextmanager
def two_machines(
    folder: Path, *, nnodes: int = 1
) -> Iterator[tuple[Job, "subprocess.Popen[bytes]", ExitStack]]:
    """Machine a has both ranks and no standby, b comes as a spare one; or each has a rank.

    With the process of b, and what ends before the job's bus does.
    """
    with ExitStack() as beside:
        bus = beside.enter_context(Bus(folder / "bus"))
        on = (f"--bus={bus.url}", "--machine=a", f"--nnodes={nnodes}")
        run = beside.enter_context(job(folder, *on, nproc=2 // nnodes))
        run.pace(3)
        beside.enter_context(run.services(bus.url))
        run.wait_for("the submission", lambda: bool(run.of("job.submitted")), READY_S)
        if nnodes == 1:
            started(run)
        other = beside.enter_context(run.machine("b"))
        started(run)
        if nnodes == 1:
            parked(run, 2, "b-")
        yield run, other, beside


def started(run: Job) -> None:
    run.wait_for("the start", lambda: bool(run.of("job.started")), READY_S)


def parked(run: Job, count: int, of: str = "") -> None:
    def enough() -> bool:
        return len([w for w in run.parked() if w.startswith(of)]) >= count

    run.wait_for(f"{count} standbys {of}", enough, READY_S)


def command(run: Job, *words: str) -> "subprocess.Popen[bytes]":
    """A `trainmover` command about the job; what it says is in the file of its name."""
    with (run.folder / words[0]).open("a") as output:
        return run.start(words[0], "--job", run.name, *words[1:], output=output)


def said(run: Job, word: str) -> str:
    return (run.folder / word).read_text()


def given_away(run: Job, allowed: int, *workers: str) -> int:
    """Steps go on until `workers` hold no rank; returns up to which the script may go then."""
    most, before = allowed, len(run.of("migration.prepared"))

    def over() -> bool:
        nonlocal most
        most = allowed + 3 + 3 * (len(run.of("migration.prepared")) - before)
        run.pace(most)
        return run.settled_without(set(workers))

    run.wait_for(f"{workers} to hold no rank", over, READY_S)
    return most


def held_by(run: Job, machine: str) -> list[str]:
    return [w for w in run.assignment().values() if w.startswith(f"{machine}-")]


def exits(run: Job, *workers: str) -> set[int | None]:
    run.wait_for("their ends", lambda: all(code_of(run, w) is not None for w in workers))
    return {code_of(run, w) for w in workers}


def assert_prefix(finished: Finished, undisturbed: Finished) -> None:
    """Of a job that was ended: as far as it came it is the same."""
    assert finished.digests, finished.output[-6000:]
    for at, digest in finished.digests.items():
        assert undisturbed.digests[at] == digest, f"{at} differs"


# ---- the default set


def test_a_machine_is_drained_and_comes_back_and_another_one_is_preempted(
    tmp_path: Path, undisturbed: Finished
) -> None:
    (block,) = run_by("test_a_machine_is_drained_and_comes_back_and_another_one_is_preempted")
    given = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    drains, undrains = ([word.replace("m7", "a") for word in words] for words in given)
    with two_machines(tmp_path) as (run, spare, beside):
        leavers = held_by(run, "a")
        drain = command(run, *drains)
        allowed = given_away(run, 3, *leavers)
        assert drain.wait(30) == 0, said(run, "drain")
        assert len(held_by(run, "b")) == 2
        assert exits(run, *leavers) == {0}
        assert "rank 0 (a-w0), rank 1 (a-w1) move by " in said(run, "drain")
        assert "how long a joiner takes to be prepared is not known yet" in said(run, "drain")
        assert len([e for e in run.of("worker.started") if e["machine"] == "a"]) == 2

        assert command(run, *undrains).wait(30) == 0, said(run, "undrain")
        parked(run, 2, "a-")  # its agent starts workers again
        spare.send_signal(signal.SIGTERM)
        given_away(run, allowed, *held_by(run, "b"))
        assert spare.wait(30) == 143
        run.pace(STEPS + 1)
        finished = ended(run, beside)
    assert not run.of("step.aborted")
    assert not run.of("worker.failed")
    assert [i["lost_steps"] for i in finished.report["incidents"]] == [0, 0]
    assert [e["kind"] for e in run.of("interruption.announced")] == ["maintenance", "preemption"]
    assert_same(finished, undisturbed)


def test_a_notice_moves_a_rank_and_one_to_all_is_the_end(
    tmp_path: Path, undisturbed: Finished
) -> None:
    (client,) = run_by("test_a_notice_moves_a_rank_and_one_to_all_is_the_end")
    (tmp_path / "announce.py").write_text(client)
    with job(tmp_path, standbys=1) as run:
        run.pace(3)
        parked(run, 1)
        session = json.loads((run.folder / "xdg" / "trainmover" / f"{run.name}.json").read_text())
        known = {f"TRAINMOVER_{k.upper()}": session[k] for k in ("job", "secret")}
        told, warned = run.assignment()[0], run.assignment()[1]
        subprocess.run(
            [sys.executable, str(tmp_path / "announce.py"), told],
            env={**os.environ, **known, "TRAINMOVER_BUS": session["url"]},
            check=True,
            timeout=30,
        )
        allowed = given_away(run, 3, told)
        parked(run, 1)
        os.kill(run.pid(warned), signal.SIGTERM)
        given_away(run, allowed, warned)
        assert exits(run, told, warned) == {0}
        run.pace(STEPS + 1)
        run.process.send_signal(signal.SIGTERM)
        finished = run.finish(20)
    assert finished.code == 143
    assert "failed (143): every machine of the job is told to go" in finished.output
    assert not run.of("worker.failed")
    (end,) = run.of("job.failed")  # ranks leave after their blocks: one may have begun the next
    assert not [e for e in run.of("step.aborted") if e["seq"] < end["seq"]]
    assert [i["kind"] for i in finished.report["incidents"]] == ["planned", "planned"]
    assert_prefix(finished, undisturbed)


# ---- cancelled


@pytest.mark.full
def test_a_move_is_taken_back_in_every_phase_until_it_is_decided(
    tmp_path: Path, undisturbed: Finished
) -> None:
    hold = tmp_path / "hold"

    def cancelled(*words: str) -> int:
        """What `cancel` ends with, of the interruption that was announced last."""
        name = run.of("interruption.announced")[-1]["interruption"]
        return command(run, "cancel", name, *words).wait(30)

    def asked(count: int, *words: str) -> "subprocess.Popen[bytes]":
        announcing = command(run, *words)
        announced = "interruption.announced"
        run.wait_for("the announcement", lambda: run.happened(announced, count))
        return announcing

    with job(tmp_path, standbys=1) as run:
        run.pace(3)
        parked(run, 1)
        before = run.assignment()

        waiting = asked(1, "migrate", "--rank", "0", "--rank", "1")
        run.wait_for("the lack of standbys", lambda: bool(run.of("pool.exhausted")))
        assert (cancelled(), waiting.wait(30)) == (0, 1)
        assert not run.of("migration.planned")

        hold.touch()
        pending = asked(2, "migrate", "--rank", "1")
        run.wait_for("a plan", lambda: run.happened("migration.planned", 1))
        assert (cancelled("--reason", "not now"), pending.wait(30)) == (0, 1)
        assert run.of("migration.aborted")[0]["reason"] == "its interruption was cancelled"
        hold.unlink()
        parked(run, 1)

        nearly = asked(3, "migrate", "--rank", "1")
        run.wait_for("a prepared joiner", lambda: run.happened("migration.prepared", 1))
        assert (cancelled(), nearly.wait(30)) == (0, 1)
        assert run.assignment() == before
        run.pace(6)
        parked(run, 1)

        hold.touch()  # the joiner was set up for rank 1, by now
        decided = asked(4, "drain", before[0], "--deadline", "8s")
        run.wait_for("haste", lambda: run.happened("migration.prepared", 2))
        run.pace(9)
        run.wait_for("a decision", lambda: run.happened("migration.decided", 1))
        assert cancelled() == 1
        assert "too late: generation 4 is decided and goes on" in said(run, "cancel")
        hold.unlink()
        given_away(run, 9, before[0])
        assert decided.wait(30) in (0, 1)  # it may hear first that it was cancelled
        run.pace(STEPS + 1)
        finished = run.finish()
        assert_each_decision_once(run)
    assert [bool(e["unready"]) for e in run.of("migration.prepared")] == [False, True]
    assert not run.of("step.aborted")
    assert [i["outcome"] for i in finished.report["incidents"]] == [
        *("aborted", "aborted", "completed")
    ]
    assert_same(finished, undisturbed)


# ---- many, and SIGTERM in between


@pytest.mark.full
def test_three_that_are_asked_for_at_once_all_move(tmp_path: Path) -> None:
    with job(tmp_path / "alone", nproc=3) as run:
        alone = run.finish()
    with job(tmp_path / "moved", nproc=3, standbys=3) as run:
        run.pace(3)
        parked(run, 3)
        before = run.assignment()
        moving = [command(run, "migrate", "--rank", str(rank)) for rank in range(3)]
        given_away(run, 3, *before.values())
        assert [one.wait(30) for one in moving] == [0, 0, 0], said(run, "migrate")
        run.pace(STEPS + 1)
        assert_same(run.finish(), alone)
        assert_each_decision_once(run)
    assert not run.of("step.aborted")


@pytest.mark.full
@pytest.mark.parametrize("who", ["leaver", "stayer", "joiner"])
def test_sigterm_in_any_phase_of_a_move_moves_that_rank_too(
    tmp_path: Path, undisturbed: Finished, who: str
) -> None:
    hold = tmp_path / "hold"
    with job(tmp_path, standbys=2) as run:
        run.pace(3)
        allowed = 3
        for phase in ("planned", "prepared", "decided"):
            parked(run, 2)
            before, num_plans = run.assignment(), len(run.of("migration.planned"))
            if phase != "prepared":
                hold.touch()
            # To come to a decision while the set-up is held the deadline has to be near.
            near = ("--deadline", "8s") if phase == "decided" else ()
            moving = command(run, "drain", before[1], *near)
            run.wait_for("a plan", partial(run.happened, "migration.planned", num_plans + 1))
            plan = run.of("migration.planned")[-1]
            if phase != "planned":
                run.wait_for("haste", phase_reached(run, "prepared", plan["generation"]))
            if phase == "decided":
                run.pace(allowed + 3)
                run.wait_for(phase, phase_reached(run, phase, plan["generation"]))
            joiner = plan["replacements"][0]["joiner"]
            worker = {"leaver": before[1], "stayer": before[0], "joiner": joiner}[who]
            os.kill(run.pid(worker), signal.SIGTERM)
            time.sleep(0.2)  # the notice is on its way while the phase lasts
            hold.unlink(missing_ok=True)
            allowed = given_away(run, allowed + 3, before[1], worker)
            moving.wait(30)
        run.pace(STEPS + 1)
        assert_same(run.finish(), undisturbed)
        assert_each_decision_once(run)
    if who != "joiner":
        assert not run.of("worker.failed")


@pytest.mark.full
@pytest.mark.parametrize("workers_too", [False, True])
def test_sigterm_to_every_machine_is_the_end_and_not_a_drain(
    tmp_path: Path, undisturbed: Finished, workers_too: bool
) -> None:
    with two_machines(tmp_path, nnodes=2) as (run, other, beside):
        run.pace(STEPS + 1)
        run.wait_for("steps", lambda: (tmp_path / "ledger" / "rank1.jsonl").exists())
        told = [run.process.pid, other.pid]
        told += [run.pid(w) for w in run.assignment().values()] if workers_too else []
        for pid in told:
            os.kill(pid, signal.SIGTERM)
        assert (run.process.wait(20), other.wait(20)) == (143, 143)
        finished = ended(run, beside)
    assert finished.code == 143
    assert not run.of("migration.planned")
    assert not run.of("worker.failed")
    assert_prefix(finished, undisturbed)


@pytest.mark.full
def test_a_second_sigterm_ends_at_once(tmp_path: Path) -> None:
    with job(tmp_path, "--grace=5m") as run:
        run.pace(3)
        started(run)  # rank 0 stays in its block, so that the first would take the grace
        run.process.send_signal(signal.SIGTERM)
        run.wait_for("the notice", lambda: run.happened("interruption.announced", 1))
        run.process.send_signal(signal.SIGTERM)
        assert run.finish(60).code == 143


# ---- machines that die in a drain


@pytest.mark.full
@pytest.mark.parametrize("victim", ["machine", "joiner", "stayer"])
def test_a_death_in_any_phase_of_a_drain_changes_nothing(
    tmp_path: Path, undisturbed: Finished, victim: str
) -> None:
    hold = tmp_path / "hold"
    with two_machines(tmp_path, nnodes=2) as (run, b, beside):
        agents = {"b": b, "c": beside.enter_context(run.machine("c"))}
        allowed = 3
        for phase in ("planned", "prepared", "decided", "switched"):
            here = run.assignment()[1].split("-")[0]
            elsewhere(run, here)
            before, generation = run.assignment(), len(run.of("migration.planned")) + 2
            if phase in ("planned", "decided"):
                hold.touch()
            near = ("--deadline", "8s") if phase == "decided" else ()
            drain = command(run, "drain", here, *near)
            reached = phase_reached(run, phase, generation)
            if phase in ("decided", "switched"):
                prepared = phase_reached(run, "prepared", generation)
                run.wait_for("prepared", prepared, READY_S)
                run.pace(allowed + 3)
            run.wait_for(phase, reached, READY_S)
            plan = next(e for e in run.of("migration.planned") if e["generation"] == generation)
            joiner = plan["replacements"][0]["joiner"]
            if victim == "machine":
                agents[here].kill()
                agents[here].wait()
            else:
                os.kill(run.pid({"joiner": joiner, "stayer": before[0]}[victim]), signal.SIGKILL)
            hold.unlink(missing_ok=True)
            lost = {"machine": before[1], "joiner": joiner, "stayer": before[0]}[victim]
            allowed = given_away(run, allowed + 3, before[1], lost)
            drain.wait(30)
            if victim == "machine":
                agents[here] = beside.enter_context(run.machine(here))
            assert command(run, "undrain", here).wait(30) == 0, said(run, "undrain")
        run.pace(STEPS + 1)
        assert_same(ended(run, beside), undisturbed)


def elsewhere(run: Job, machine: str) -> None:
    """Blocks until a standby is parked on another machine."""

    def somebody() -> bool:
        return any(not worker.startswith(f"{machine}-") for worker in run.parked())

    run.wait_for(f"a standby that is not on {machine}", somebody, READY_S)


def phase_reached(run: Job, phase: str, generation: int) -> Callable[[], bool]:
    return lambda: phase_of(run, phase, generation)


@pytest.mark.full
def test_a_machine_that_was_preempted_comes_back_and_stands_by(
    tmp_path: Path, undisturbed: Finished
) -> None:
    with two_machines(tmp_path) as (run, spare, beside):
        spare.send_signal(signal.SIGTERM)
        assert spare.wait(10) == 143  # it held no rank
        assert [e["machine"] for e in run.of("interruption.announced")] == ["b"]
        beside.enter_context(run.machine("b"))
        parked(run, 2, "b-")
        (cancelled,) = run.of("interruption.cancelled")
        assert cancelled["reason"] == "machine b is back"
        leaver = run.assignment()[0]
        to = next(worker for worker in run.parked() if worker.startswith("b-"))
        moved = command(run, "migrate", "--rank", "0", "--to", to)
        given_away(run, 3, leaver)
        assert moved.wait(30) == 0, said(run, "migrate")
        assert run.assignment()[0] == to
        run.pace(STEPS + 1)
        assert_same(ended(run, beside), undisturbed)
