"""What a rehearsal says of runs that are the same, or are not: literal step lines in, words out."""

from itertools import pairwise

import pytest

from trainmover.cli.comparison import Difference, Lines, Ran, compare
from trainmover.cli.drills import KILL_POINTS, draw, happened
from trainmover.cli.incidents import Incident, incidents
from trainmover.cli.main import parser
from trainmover.cli.options import WrongUsage
from trainmover.cli.report import Report
from trainmover.cli.verdict import Verdict, in_words, judge
from trainmover.schemas.events import MigrationPlanned, Replacement
from trainmover.schemas.fault import Fault
from trainmover.schemas.recorded import Recorded
from trainmover.schemas.steplog import StepLine

KILL = Fault("kill", rank=1, step=2, at="backward")
STEPS, RANKS = 5, 2


def line(step: int, loss: float, **objects: str) -> StepLine:
    """In the order in which a rank notes them: modules, optimizers, the rest, own state."""
    found = {"model": "m", "optimizer": "o", "trainmover_loop": "l", "rng.cpu": "r"}
    return StepLine(
        step=step,
        generation=1,
        worker="m-w0",
        digest="d",
        objects=found
        | {name.replace("_", ".", name.startswith("rng")): v for name, v in objects.items()},
        numbers={"loss": loss},
    )


def lines(**changed: str) -> dict[tuple[int, int], StepLine]:
    """Every rank after every step; with `changed`, rank 1 from step 3 on."""
    return {
        (step, rank): line(step, 1.5, **(changed if step >= 3 and rank == 1 else {}))
        for step in range(STEPS)
        for rank in range(RANKS)
    }


def incident(*ranks: int) -> Incident:
    """One in which these ranks were replaced."""
    planned = MigrationPlanned(
        job="j",
        run="r",
        generation=2,
        incident="g2",
        kind="crash",
        replacements=tuple(
            Replacement(rank=rank, leaver=f"m-w{rank}", joiner=f"m-w{rank + 8}") for rank in ranks
        ),
        members=(),
        reason="their workers died",
    )
    (found,) = incidents([Recorded(1, 100.0, planned)])
    return found


def ran(
    found: Lines,
    *incidents: Incident,
    code: int = 0,
    steps: int | None = STEPS,
    state: str | None = "end",
) -> Ran:
    report = Report(
        job="j",
        run="r",
        layout="dp=2",
        exit_code=code,
        completed_steps=steps,
        state_digest=state,
        incidents=incidents,
    )
    return Ran("a run", code, 1.0, found, report)


def words(*runs: Ran, kills: tuple[Fault, ...] = ()) -> str:
    return "\n".join(in_words(judge(runs, kills)))


# ---- comparing two runs


def test_runs_with_the_same_lines_and_the_same_end_do_not_differ() -> None:
    found = compare(ran(lines()), ran(lines()))
    assert (found.difference, found.num_digests) == (None, STEPS * RANKS)


def test_the_first_step_that_differs_is_named_with_its_ranks() -> None:
    found = compare(ran(lines()), ran(lines(model="x")))
    assert found.difference == Difference(step=3, ranks=(1,), objects=("model",))


def test_what_decides_a_step_is_named_before_what_the_step_changes() -> None:
    changed = lines(model="x", optimizer="x", rng_cpu="x")
    found = compare(ran(lines()), ran(changed)).difference
    assert found is not None
    assert found.objects == ("rng.cpu", "optimizer", "model")


def test_an_object_that_only_one_run_has_differs() -> None:
    found = compare(ran(lines()), ran(lines(average="x"))).difference
    assert found is not None
    assert found.objects == ("average",)


def test_a_line_that_a_dead_rank_did_not_write_is_no_difference() -> None:
    left = lines()
    del left[2, 1]
    found = compare(ran(lines()), ran(left))
    assert (found.difference, found.num_digests) == (None, STEPS * RANKS - 1)


def test_a_loop_whose_end_a_rank_learns_late_is_no_difference() -> None:
    assert compare(ran(lines()), ran(lines(trainmover_loop="x"))).difference is None


def test_runs_that_end_differently_differ_at_their_end() -> None:
    at_end = Difference(step=STEPS, ranks=(), objects=())
    assert compare(ran(lines()), ran(lines(), state="other")).difference == at_end
    stopped = ran(lines(), steps=3)
    assert compare(ran(lines()), stopped).difference == Difference(step=3, ranks=(), objects=())


def test_a_run_that_failed_is_compared_as_far_as_it_came() -> None:
    failed = ran(lines(), code=1, steps=None, state=None)
    assert compare(ran(lines()), failed).difference is None


def test_numbers_alone_are_told_and_make_no_difference() -> None:
    other = lines() | {(1, rank): line(1, float("nan")) for rank in range(RANKS)}
    found = compare(ran(lines()), ran(other))
    assert (found.difference, found.numbers) == (None, {"loss": 1})
    assert compare(ran(other), ran(other)).numbers == {}


# ---- the verdict


def test_the_same_bits_in_all_runs() -> None:
    findings = judge([ran(lines()), ran(lines()), ran(lines(), incident(1))], [KILL])
    assert findings.verdict is Verdict.SAME
    assert findings.not_reached == ()
    assert "SAME: 1 kill left no trace" in "\n".join(in_words(findings))


def test_runs_in_which_nobody_died_say_nothing_of_recovery() -> None:
    said = words(ran(lines()), ran(lines()), ran(lines()), kills=(KILL,))
    assert "SAME, but nobody was killed" in said


def test_undisturbed_runs_that_differ_make_the_script_not_deterministic() -> None:
    runs = ran(lines()), ran(lines(optimizer="x", model="x"))
    assert judge(runs, ()).verdict is Verdict.NOT_DETERMINISTIC
    said = words(*runs)
    assert "`optimizer` of rank 1 differs for the first time after step 3 (and `model`)" in said
    assert "not deterministic" in said
    assert "os.urandom" in said


def test_a_run_with_kills_that_differs_has_untracked_state_and_the_kill_is_named() -> None:
    other = lines(model="x") | {(3, 0): line(3, 1.25), (3, 1): line(3, 1.25, model="x")}
    runs = ran(lines()), ran(lines()), ran(other, incident(1))
    assert judge(runs, [KILL]).verdict is Verdict.UNTRACKED_STATE
    said = words(*runs, kills=(KILL,))
    assert "`model` of rank 1 differs for the first time after step 3" in said
    assert "before that: rank 1 was killed in step 2 at `backward`" in said
    assert "ctx.vars" in said
    losses = judge(runs, [KILL]).losses
    assert losses == ((1, 1.5, 1.5), (2, 1.5, 1.5), (3, 1.5, 1.25), (4, 1.5, 1.5))
    marked = [text.split() for text in said.splitlines() if "<-" in text]
    assert marked == [["3", "1.5", "1.25", "<-", "differs"]]


def test_a_kill_that_did_not_happen_is_told() -> None:
    kills = (KILL, Fault("kill", rank=1, step=4, at="frame"))
    said = words(ran(lines()), ran(lines()), ran(lines(), incident(1)), kills=kills)
    assert "the kill kill:rank=1,step=4,at=frame,bytes=100 did not happen" in said
    assert "SAME: 1 kill left" in said


def test_a_run_that_failed_is_told_with_what_differed_before() -> None:
    failed = ran(lines(model="x"), incident(1), code=1, steps=None, state=None)
    runs = ran(lines()), ran(lines()), failed
    assert judge(runs, [KILL]).verdict is Verdict.FAILED
    said = words(*runs, kills=(KILL,))
    assert "FAILED: run 3, a run, ended with exit code 1" in said
    assert "until then: `model` of rank 1 differs for the first time after step 3" in said


# ---- drawing


@pytest.mark.parametrize("seed", range(50))
def test_kills_are_in_different_steps_within_the_run(seed: int) -> None:
    kills = draw(seed, 3, ranks=4, steps=20)
    assert len(kills) == 3
    steps = [kill.step or 0 for kill in kills]
    assert all(one < other for one, other in pairwise(steps))
    assert min(steps) >= 4
    assert max(steps) < 19
    assert {kill.at for kill in kills} <= set(KILL_POINTS)
    assert all(kill.rank in range(4) for kill in kills)
    assert kills == draw(seed, 3, ranks=4, steps=20)


def test_all_ranks_and_points_are_drawn() -> None:
    kills = [kill for seed in range(200) for kill in draw(seed, 2, ranks=4, steps=30)]
    assert {kill.rank for kill in kills} == set(range(4))
    assert {kill.at for kill in kills} == set(KILL_POINTS)


@pytest.mark.parametrize(("steps", "kills"), [(0, 0), (2, 0), (3, 1), (4, 2), (30, 5)])
def test_a_short_run_has_room_for_fewer_kills(steps: int, kills: int) -> None:
    assert len(draw(1, 5, ranks=2, steps=steps)) == kills


def test_a_drawn_kill_is_read_again_as_it_was() -> None:
    for kill in draw(3, 5, ranks=2, steps=50):
        read = Fault.parse(str(kill))
        assert read == kill


def test_a_kill_is_known_to_have_happened_by_its_incident() -> None:
    twice = (KILL, Fault("kill", rank=1, step=4, at="vote"))
    assert happened(twice, [incident(1)]) == (KILL,)
    assert happened(twice, [incident(0, 1), incident(1)]) == twice


# ---- flags


def test_a_layout_without_replicas_is_refused() -> None:
    args = parser().parse_args(["rehearse", "--nproc-per-node=2", "--layout=pp=2", "train.py"])
    with pytest.raises(WrongUsage, match="no rank has a replica"):
        args.command(args)
