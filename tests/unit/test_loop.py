"""The loop of steps in a worker of its own: what is given, refused, warned of and said."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from structlog.testing import capture_logs
from tests.unit.one_rank import OneRank
from tests.unit.training_script import Script, at, training
from torch.utils.data import DataLoader, TensorDataset

from trainmover.runtime.commit import Phase
from trainmover.runtime.context import Context
from trainmover.runtime.performance import Performance
from trainmover.runtime.recovery import Rerun, Retired
from trainmover.runtime.step import Step
from trainmover.schemas.events import RankReady, StandbyWarmed

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of"),  # shadow steps never step
    pytest.mark.usefixtures("process"),
]


# ---- the loop


def test_every_step_is_committed_once_and_in_order(one: OneRank) -> None:
    train, given = training(3)
    performance = one.train(train)
    assert [(s.number, s.committed, s.closing) for s in given] == [
        (0, True, False),
        (1, True, False),
        (2, True, False),
    ]
    assert performance.finished
    assert one.seat.position.phase is Phase.DONE
    assert [json.loads(line)["step"] for line in one.digests()] == [0, 1, 2]
    assert len({json.loads(line)["digest"] for line in one.digests()}) == 3


@pytest.mark.parametrize("steps", [0, 2])
def test_a_closing_block_comes_after_the_last_update(one: OneRank, steps: int) -> None:
    train, given = training(steps, closing=True)
    one.train(train)
    assert [s.closing for s in given] == [False] * steps + [True]
    assert all(s.committed for s in given)


@pytest.mark.parametrize("closing", [False, True])
def test_stop_ends_the_loop_after_its_step(one: OneRank, closing: bool) -> None:
    train, given = training(9, closing=closing, before_vote=at(1, lambda s, _: s.stop()))
    one.train(train)
    assert [s.number for s in given if not s.closing] == [0, 1]
    assert [s.closing for s in given] == [False, False] + [True] * closing


def test_stop_after_the_vote_ends_the_loop_a_step_later(one: OneRank) -> None:
    train, given = training(9, after_vote=at(1, lambda s, _: s.stop()))
    one.train(train)
    assert [s.number for s in given] == [0, 1, 2]


def test_a_step_that_is_not_entered_is_an_error(one: OneRank) -> None:
    def train(ctx: Context) -> None:
        for _ in ctx.steps(3):
            if not ctx.shadow:
                continue
            with _:
                pass

    with pytest.raises(RuntimeError, match=r"each step of ctx\.steps is entered"):
        one.train(train)


def test_a_step_is_entered_once(one: OneRank) -> None:
    def again(step: Step, script: Script) -> None:
        with pytest.raises(RuntimeError, match="a step is entered once"), step:
            raise AssertionError("entered")

    train, given = training(1, after_block=at(0, again))
    one.train(train)
    assert given[0].committed


def test_there_is_one_loop(one: OneRank) -> None:
    def train(ctx: Context) -> None:
        for _ in range(2):
            for step in ctx.steps(1):
                with step:
                    pass

    with pytest.raises(RuntimeError, match=r"ctx\.steps may be used once"):
        one.train(train)


# ---- shadow steps


def test_shadow_steps_leave_no_trace(one: OneRank) -> None:
    digests: list[str] = []
    reached: list[str] = []

    def train(ctx: Context) -> None:
        script = Script(ctx)
        assert not ctx.shadow
        for step in ctx.steps(2):
            with step:
                if step.number == 0:
                    digests.append(script.digest)
                assert ctx.shadow == step.shadow
                reached.append("shadow" if step.shadow else "real")
                loss = script.backward()
                ctx.after(step, lambda: reached.append("after"))
                if step.shadow:
                    step.report(loss=loss)
                    step.stop()
                script.update()
                reached.append("updated")

    performance = one.train(train)
    assert len(digests) == 3
    assert len(set(digests)) == 1
    assert reached == ["shadow"] * 2 + ["real", "updated", "after"] * 2
    assert performance.averages == {}


def test_an_error_in_a_shadow_step_is_not_swallowed(one: OneRank) -> None:
    def wrong(step: Step, script: Script) -> None:
        if step.shadow:
            raise KeyError("user")

    train, _ = training(1, before_vote=wrong)
    with pytest.raises(KeyError, match="user"):
        one.train(train)


def test_a_standby_warms_up_with_one_update_says_so_and_parks(one: OneRank) -> None:
    states: list[int] = []

    def train(ctx: Context) -> None:
        script = Script(ctx)
        for step in ctx.steps(5):
            with step:
                assert step.shadow
                assert ctx.shadow
                script.backward()
                assert isinstance(ctx._run, Performance)
                if ctx._run.let_update:
                    one.retire()
                script.update()
            states.append(len(script.optimizer.state))

    with pytest.raises(Retired):
        one.stand_by(train)
    assert states[:-1] == [0, 0]
    assert states[-1] > 0
    assert len(one.said.of(StandbyWarmed)) == 1
    assert one.said.of(RankReady) == []
    assert one.digests() == []


def test_a_standby_leaves_its_shadow_steps_when_a_plan_gives_it_a_rank(one: OneRank) -> None:
    blocks: list[Step] = []

    def train(ctx: Context) -> None:
        script = Script(ctx)
        for step in ctx.steps(5):
            blocks.append(step)
            with step:
                script.backward()
                one.decide(target=3)

    with pytest.raises(Rerun):
        one.stand_by(train)
    assert len(blocks) == 1


# ---- what does not belong where it stands


def test_collectives_between_blocks_are_refused_and_show_the_move(one: OneRank) -> None:
    refused: list[str] = []

    def reduce() -> None:
        with pytest.raises(RuntimeError, match=r"got all_reduce .* outside") as error:
            dist.all_reduce(torch.ones(1))
        refused.append(str(error.value))

    train, _ = training(2, after_block=lambda step, script: reduce())

    def before_and_after(ctx: Context) -> None:
        dist.all_reduce(torch.ones(1))
        train(ctx)
        reduce()
        dist.barrier()  # habit

    one.train(before_and_after)
    assert len(refused) == 2 + 2 + 1  # after shadow steps, steps, and the loop
    assert "Move it into the block, before optimizer.step()" in refused[0]


def test_an_update_between_blocks_is_refused(one: OneRank) -> None:
    def update(step: Step, script: Script) -> None:
        with pytest.raises(RuntimeError, match="stepped outside `with step:`"):
            script.optimizer.step()

    one.train(training(1, after_block=update)[0])


def test_a_batch_between_blocks_is_refused(one: OneRank) -> None:
    def draw(step: Step, script: Script) -> None:
        with pytest.raises(RuntimeError, match=r"move next\(data\) into the block"):
            next(script.data)

    one.train(training(1, after_block=draw)[0])


def test_randomness_after_the_update_is_sent_late_and_named_once(one: OneRank) -> None:
    def draw(step: Step, script: Script) -> None:
        torch.rand(1)

    with capture_logs() as logs:
        one.train(training(4, after_vote=draw)[0])
    late = [log["parts"] for log in logs if log["event"] == "extras.late"]
    assert late == [["rng.cpu"]]


def test_a_job_that_draws_nothing_late_is_not_warned(one: OneRank) -> None:
    with capture_logs() as logs:
        one.train(training(4)[0])
    assert [log for log in logs if log["log_level"] == "warning"] == []


def test_a_collective_after_the_update_is_named_once(one: OneRank) -> None:
    def reduce(step: Step, script: Script) -> None:
        dist.all_reduce(torch.ones(1))

    with capture_logs() as logs:
        one.train(training(3, after_vote=reduce)[0])
    tail = [log["op"] for log in logs if log["event"] == "collective.after_the_update"]
    assert tail == ["all_reduce"]


def test_a_rebindable_script_may_ask_for_its_rank_in_the_loop_only(tmp_path: Path) -> None:
    one = OneRank(tmp_path, layout="pp=1,dp=1")
    assigned: list[int] = []

    def train(ctx: Context) -> None:
        script = Script(ctx)
        with pytest.raises(RuntimeError, match=r"ctx\.rank is not known before the first step"):
            _ = ctx.rank
        with pytest.raises(RuntimeError, match=r"ctx\.coordinate\('dp'\) is not known"):
            ctx.coordinate("dp")
        with pytest.raises(RuntimeError, match=r"ctx\.mesh is not known"):
            _ = ctx.mesh
        assert ctx.coordinate("pp") == 0
        ctx.on_assigned(lambda: assigned.append(ctx.rank))
        ctx.batches(lambda: DataLoader(TensorDataset(torch.arange(float(2 + ctx.rank)))))
        assert assigned == []
        for step in ctx.steps(1):
            with step:
                assert ctx.rank == ctx.coordinate("dp") == 0
                script.backward()
                script.update()

    one.train(train, rebindable=True)
    one.close()
    assert assigned == [0]


# ---- what others hear


def test_reported_numbers_travel_with_the_vote_and_the_beat(one: OneRank) -> None:
    def report(step: Step, script: Script) -> None:
        step.report(tokens=torch.tensor(4.0 + step.number, requires_grad=True), norm=1)

    performance = one.train(training(2, before_vote=report)[0])
    assert performance.averages["tokens"] == 5.0
    assert one.said.beats[-1].phase == "done"
    assert one.said.beats[-1].numbers == performance.averages
    assert one.said.beats[-1].committed == 2


def test_a_number_counts_for_the_step_that_reports_it_only(one: OneRank) -> None:
    once = at(0, lambda step, script: step.report(only=1))
    performance = one.train(training(3, before_vote=once)[0])
    assert set(performance.averages) == {"loss"}


def test_a_rank_is_ready_once_its_shadow_steps_are_over(one: OneRank) -> None:
    one.train(training(1)[0])
    (ready,) = one.said.of(RankReady)
    assert (ready.rank, ready.generation, ready.bound) == (0, 1, "set-up")
    assert set(ready.shards) >= {"model", "optimizer", "scheduler"}


def test_torchruns_variables_are_set(one: OneRank) -> None:
    seen: list[str] = []

    def train(ctx: Context) -> None:
        seen.extend(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        training(1)[0](ctx)

    one.train(train)
    assert seen == ["0", "1", "0"]
