"""What a rank notes after a step for `--step-digests`, and how `max_steps` shortens a job."""

import math

import pytest
import torch
import torch.distributed as dist
from tests.unit.one_rank import OneRank
from tests.unit.training_script import Script, at, training

from trainmover.runtime.recovery import Retired
from trainmover.runtime.step import Step
from trainmover.schemas.steplog import StepLine

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of"),  # shadow steps never step
    pytest.mark.usefixtures("process"),
]


def noted(one: OneRank) -> list[StepLine]:
    return [StepLine.model_validate_json(line) for line in one.digests()]


def changed(before: StepLine, after: StepLine) -> set[str]:
    return {name for name in after.objects if before.objects.get(name) != after.objects[name]}


def test_every_tracked_object_and_part_of_own_state_has_a_digest_of_its_own(one: OneRank) -> None:
    def count(step: Step, script: Script) -> None:
        script.ctx.vars["counted"] = True

    train, _ = training(3, before_vote=at(1, count))
    one.train(train)
    first, second, third = noted(one)
    always = {"model", "optimizer", "scheduler", "batches.0", "rng.cpu", "ctx.vars"}
    assert always <= changed(first, second)
    assert always <= changed(second, third)
    assert {"rng.python", "rng.numpy", "trainmover_loop"} <= first.objects.keys()
    assert not {"rng.python", "rng.numpy", "trainmover_loop"} & changed(first, second)
    assert any(name.startswith("buffer.") for name in changed(first, second))


def test_numbers_are_those_of_the_step_whose_vote_carried_them(one: OneRank) -> None:
    def report(step: Step, script: Script) -> None:
        step.report(loss=float(step.number) if step.number != 2 else math.nan)

    train, _ = training(4, before_vote=report)
    one.train(train)
    losses = [line.numbers["loss"] for line in noted(one)]
    # `training` reports again after the vote, for the next one; what is said last counts.
    assert losses[:2] == [0.0, 1.0]
    assert math.isnan(losses[2])


def test_a_rank_that_a_step_left_dirty_does_not_note_it(one: OneRank) -> None:
    def communicate(step: Step, script: Script) -> None:
        one.break_links()
        dist.all_reduce(torch.ones(1))

    def leave(step: Step, script: Script) -> None:
        if one.links.data_fence.revoked:
            one.retire()

    train, given = training(3, after_vote=at(1, communicate), after_block=leave)
    with pytest.raises(Retired):
        one.train(train)
    assert [step.number for step in given if step.committed] == [0, 1]
    assert [line.step for line in noted(one)] == [0]


@pytest.mark.parametrize(("bound", "made"), [(0, 5), (2, 2), (5, 5), (9, 5)])
def test_no_more_updates_than_the_bound_and_then_the_closing_block(
    one: OneRank, bound: int, made: int
) -> None:
    one.env = one.env.model_copy(update={"max_steps": bound})
    train, given = training(5, closing=True)
    one.train(train)
    assert [step.closing for step in given] == [False] * made + [True]
