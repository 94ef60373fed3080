"""A block is done once, or undone and done again, or held until somebody knows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.unit.linked_ranks import WITHIN_S, Rank, environment, live, switch, world
from tests.unit.one_rank import OneRank, Said, decided, perform
from tests.unit.training_script import Script, at, breaking, recovering, training

from trainmover.runtime.aborts import StepAborted
from trainmover.runtime.admission import Admission
from trainmover.runtime.context import Context
from trainmover.runtime.engine import LinkEngine, Wiring
from trainmover.runtime.groups import LinkGroup
from trainmover.runtime.recovery import Retired
from trainmover.runtime.shadow import MIN_SHADOW, NUMBERS_APART
from trainmover.runtime.step import Step
from trainmover.runtime.topology import ring_edges
from trainmover.schemas.commands import Retire
from trainmover.schemas.events import StepAborted as StepAbortedEvent

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of"),  # shadow steps never step
    pytest.mark.usefixtures("process"),
]


# ---- undone and done again


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_job_with_an_undone_block_comes_to_the_same_bits(
    one: OneRank, tmp_path: Path, number: int
) -> None:
    (tmp_path / "calm").mkdir()
    undisturbed = OneRank(tmp_path / "calm")
    undisturbed.train(training(4)[0])
    undisturbed.close()
    train, given = training(4, before_vote=at(number, breaking(one)), after_block=recovering(one))
    one.train(train)
    numbers = [0, 1, 2, 3]
    numbers.insert(number, number)
    assert [s.number for s in given] == numbers
    assert [s.committed for s in given].count(False) == 1
    assert [_digest(line) for line in one.digests()] == [
        _digest(line) for line in undisturbed.digests()
    ]
    assert [json.loads(line)["generation"] for line in one.digests()] == [1] * number + [2] * (
        4 - number
    )


def _digest(line: str) -> Any:
    return json.loads(line)["digest"]


def test_every_block_is_said_to_be_a_step_also_the_one_after_a_recovery(one: OneRank) -> None:
    phases: list[tuple[int, str]] = []

    def note_and_break(step: Step, script: Script) -> None:
        phases.append((step.number, one.said.beats[-1].phase))
        if not step.shadow and len(phases) == 4:
            one.break_links()

    train, _ = training(3, before_vote=note_and_break, after_block=recovering(one))
    one.train(train)
    assert phases == [
        (0, "shadow"),
        (0, "shadow"),
        (0, "step"),
        (1, "step"),
        (1, "step"),
        (2, "step"),
    ]
    assert [beat.phase for beat in one.said.beats if beat.phase != "shadow"] == [
        *("step", "vote"),
        *("step", "parked", "step", "vote"),
        *("step", "vote"),
        "step",
        "done",
    ]


def test_an_undone_block_is_said_once_with_its_step_and_cause(one: OneRank) -> None:
    train, _ = training(3, before_vote=at(1, breaking(one)), after_block=recovering(one))
    one.train(train)
    (said,) = one.said.of(StepAbortedEvent)
    assert (said.step, said.generation, said.cause) == (1, 1, "a link broke")


def test_an_abort_passes_every_except_of_user_code_for_errors(one: OneRank) -> None:
    caught: list[str] = []

    def train(ctx: Context) -> None:
        script = Script(ctx)
        breaks = at(1, breaking(one))
        for step in ctx.steps(2):
            with step:
                script.backward()
                breaks(step, script)
                try:
                    script.update()
                except Exception:
                    caught.append("error")
            recovering(one)(step, script)

    one.train(train)
    assert caught == []
    assert one.said.of(StepAbortedEvent)


def test_an_abort_that_user_code_swallows_undoes_the_block_all_the_same(one: OneRank) -> None:
    gates: list[str] = []

    def train(ctx: Context) -> None:
        script = Script(ctx)
        breaks = at(0, breaking(one))
        for step in ctx.steps(1):
            with step:
                before = script.digest
                script.backward()
                breaks(step, script)
                for _ in range(2):
                    try:
                        script.optimizer.step()
                    except BaseException as error:
                        gates.append(type(error).__name__)
                script.optimizer.zero_grad()
            if not step.committed:
                assert script.digest == before
            recovering(one)(step, script)

    one.train(train)
    # Two shadow steps and the undone attempt, at both gates of each.
    assert gates == [StepAborted.__name__] * 6
    assert len(one.digests()) == 1


def test_an_error_that_comes_of_a_broken_generation_is_no_error_of_the_user(
    one: OneRank,
) -> None:
    def fail(step: Step, script: Script) -> None:
        one.break_links()
        raise ValueError("the loss is zero")

    train, given = training(2, before_vote=at(1, fail), after_block=recovering(one))
    one.train(train)
    assert [s.committed for s in given] == [True, False, True]
    assert "the loss is zero" in one.said.of(StepAbortedEvent)[0].cause


def test_an_error_in_a_healthy_generation_is_the_users(one: OneRank) -> None:
    def fail(step: Step, script: Script) -> None:
        raise ValueError("the loss is zero")

    train, given = training(2, before_vote=at(1, fail))
    with pytest.raises(ValueError, match="the loss is zero"):
        one.train(train)
    assert not given[-1].committed
    assert one.said.of(StepAbortedEvent) == []


def test_ctrl_c_is_never_taken_for_an_abort(one: OneRank) -> None:
    def interrupt(step: Step, script: Script) -> None:
        one.break_links()
        raise KeyboardInterrupt

    train, _ = training(2, before_vote=at(1, interrupt))
    with pytest.raises(KeyboardInterrupt):
        one.train(train)


def test_what_stands_after_a_step_runs_once_when_it_is_committed(one: OneRank) -> None:
    ran: list[int] = []

    def train(ctx: Context) -> None:
        script = Script(ctx)
        breaks = at(1, breaking(one))
        for step in ctx.steps(3):
            with step:
                script.backward()
                ctx.after(step, lambda step=step: ran.append(step.number))  # type: ignore[misc]
                breaks(step, script)
                script.update()
                assert step.number not in ran
            recovering(one)(step, script)

    one.train(train)
    assert one.generation == 2
    assert ran == [0, 1, 2]


def test_a_collective_that_is_cut_off_after_the_vote_makes_the_rank_dirty(
    one: OneRank,
) -> None:
    def log_loss(step: Step, script: Script) -> None:
        one.break_links()
        dist.all_reduce(torch.ones(1))
        raise AssertionError("communicated without a generation")

    def leave(step: Step, script: Script) -> None:
        if one.links.data_fence.revoked:
            one.retire()

    train, given = training(3, after_vote=at(1, log_loss), after_block=leave)
    with pytest.raises(Retired):
        one.train(train)
    assert [s.committed for s in given] == [True, True]
    answer = one.seat.answer()
    assert (answer.committed, answer.dirty) == (2, True)
    assert one.said.of(StepAbortedEvent)[0].step == 2


# ---- held: voted, and the result did not come


LEAVE = Retire(reason="test")


def agree_on_shadow_steps(peer: Rank) -> None:
    """Rank 0's part in what ends the shadow steps of all ranks."""
    data, fence = peer.links.data, peer.links.data_fence
    wiring = Wiring(data, fence, Admission(), lambda issued: None, lambda *facts: None)
    engine = LinkEngine(wiring, "0-1#0", (0, 1), 0)
    engine.count_from(MIN_SHADOW * NUMBERS_APART)
    LinkGroup(engine).allreduce([torch.ones(1, dtype=torch.uint8)], lowest()).wait()
    engine.close(WITHIN_S)


def lowest() -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
    return options


def hold_in_step_0(folder: Path, target: int) -> tuple[Step, Rank, Said, list[bool]]:
    """Rank 1 of two is cut off after its vote and told that `target` steps are committed."""
    given: list[Step] = []
    undone: list[bool] = []
    with world(folder, 2) as two:
        peer, rank = two.ranks
        for each in two.ranks:
            each.links.open_data(1)
        peer.links.data.register("0-1#0", ring_edges((0, 1)))
        said = Said()

        def cut(point: str) -> None:
            if point == "vote":  # rank 1's is here, the result is not out
                rank.collect(2)
                rank.seat.order(decided(2, switch(1, two.members), target))
                raise ConnectionError("test")

        def other() -> None:
            try:
                peer.links.data.connect("0-1#0", WITHIN_S)
                agree_on_shadow_steps(peer)
                peer.vote.rebuddy(0, peer.parts(), WITHIN_S)
                with pytest.raises(ConnectionError):
                    peer.voted(hit=cut)
            except BaseException:
                rank.links.end(2)  # whatever went wrong here, rank 1 does not wait for it
                rank.seat.retire(LEAVE)
                raise

        def train(ctx: Context) -> None:
            script = Script(ctx)
            for step in ctx.steps(2):
                with step:
                    before = script.digest
                    script.backward()
                    script.update()
                if not step.shadow:
                    given.append(step)
                    undone.append(script.digest == before)
                    rank.seat.retire(LEAVE)

        future = two.pool.submit(other)
        role = live(switch(1, two.members), 1)
        with pytest.raises(Retired):
            perform(train, environment(folder, 1, 2), role, rank.seat, rank.links, said)
        future.result(WITHIN_S)
    (step,) = given
    return step, rank, said, undone


def test_a_held_step_is_applied_when_another_rank_is_known_to_have_committed_it(
    tmp_path: Path,
) -> None:
    step, rank, said, undone = hold_in_step_0(tmp_path, target=1)
    assert step.committed
    assert undone == [False]
    assert rank.seat.answer().committed == 1
    assert said.of(StepAbortedEvent) == []
    assert "hold" in [beat.phase for beat in said.beats]


def test_a_held_step_is_undone_when_no_rank_has_committed_it(tmp_path: Path) -> None:
    step, rank, said, undone = hold_in_step_0(tmp_path, target=0)
    assert not step.committed
    assert undone == [True]
    assert rank.seat.answer().committed == 0
    (aborted,) = said.of(StepAbortedEvent)
    assert aborted.step == 0
