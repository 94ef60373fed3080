"""`with step:` in a worker of its own: done once, or undone and done again, or an error."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from structlog.testing import capture_logs
from tests.unit.linked_ranks import WITHIN_S, Rank, environment, live, switch, world
from tests.unit.one_rank import OneRank, Said, decided, perform
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainmover.runtime.aborts import StepAborted
from trainmover.runtime.block import Step
from trainmover.runtime.commit import Phase
from trainmover.runtime.context import Context
from trainmover.runtime.recovery import Rerun, Retired
from trainmover.runtime.topology import ring_edges
from trainmover.schemas.events import FaultInjected, RankReady, StandbyWarmed
from trainmover.schemas.events import StepAborted as StepAbortedEvent
from trainmover.schemas.fault import POINTS

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of")  # shadow steps never step

Do = Callable[[Step, "Script"], None]


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker sets does not outlive the test."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch wraps it, each time


@pytest.fixture
def one(tmp_path: Path) -> Iterator[OneRank]:
    made = OneRank(tmp_path)
    yield made
    made.close()


def nothing(step: Step, script: "Script") -> None:
    pass


class Script:
    """What `train` has: a model with dropout and buffers, a scheduler, a shuffled loader."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.model = nn.Sequential(
            nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        items = TensorDataset(torch.arange(40.0).view(10, 4) / 40)
        self.data = ctx.batches(DataLoader(items, batch_size=4, shuffle=True))
        ctx.vars["seen"] = 0
        ctx.track(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)

    def backward(self) -> torch.Tensor:
        (batch,) = next(self.data)
        self.ctx.vars["seen"] += 1
        loss: torch.Tensor = self.model(batch).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    @property
    def digest(self) -> str:
        return self.ctx._run.tracked.state_digest()


def training(
    steps: int,
    *,
    closing: bool = False,
    before_vote: Do = nothing,
    after_vote: Do = nothing,
    after_block: Do = nothing,
) -> tuple[Callable[[Context], None], list[Step]]:
    """A `train`, and the list that the steps it was given go to, shadow steps left out."""
    given: list[Step] = []

    def train(ctx: Context) -> None:
        script = Script(ctx)
        for step in ctx.steps(steps, closing=closing):
            if not step.shadow:
                given.append(step)
            with step:
                if step.closing:
                    continue
                loss = script.backward()
                before_vote(step, script)
                script.update()
                step.report(loss=loss)
                after_vote(step, script)
            after_block(step, script)

    return train, given


def at(number: int, do: Do) -> Do:
    """`do`, at the first attempt of that step."""
    left = [number]

    def once(step: Step, script: Script) -> None:
        if not step.shadow and step.number in left:
            left.remove(step.number)
            do(step, script)

    return once


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

    with pytest.raises(RuntimeError, match="each step of ctx.steps is entered"):
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
        digests.append(script.digest)
        for step in ctx.steps(1):
            with step:
                if not step.shadow:
                    digests.append(script.digest)
                assert ctx.shadow == step.shadow
                reached.append("shadow" if step.shadow else "real")
                step.report(loss=script.backward())
                step.stop()
                ctx.after(step, lambda: reached.append("after"))
                script.update()
                reached.append("updated")

    performance = one.train(train)
    assert digests[0] == digests[1]
    assert reached == ["shadow", "shadow", "real", "updated", "after"]
    assert len(performance.averages) == 1


def test_an_error_in_a_shadow_step_is_not_swallowed(one: OneRank) -> None:
    def wrong(step: Step, script: Script) -> None:
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


# ---- undone and done again


def break_links(step: Step, script: Script) -> None:
    BROKEN.append(step.number)
    ONE[0].break_links()


ONE: list[OneRank] = []
BROKEN: list[int] = []


@pytest.fixture
def broken(one: OneRank) -> Iterator[OneRank]:
    """`break_links` is about this one."""
    ONE.append(one)
    yield one
    ONE.clear()
    BROKEN.clear()


def recover(step: Step, script: Script) -> None:
    """As the mover does after a relink, as soon as a block was undone."""
    if not step.shadow and not step.committed:
        ONE[0].recover()


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_job_with_an_undone_block_comes_to_the_same_bits(
    broken: OneRank, tmp_path: Path, number: int
) -> None:
    (tmp_path / "calm").mkdir()
    undisturbed = OneRank(tmp_path / "calm")
    undisturbed.train(training(4)[0])
    undisturbed.close()
    train, given = training(4, before_vote=at(number, break_links), after_block=recover)
    broken.train(train)
    numbers = [0, 1, 2, 3]
    numbers.insert(number, number)
    assert [s.number for s in given] == numbers
    assert [s.committed for s in given].count(False) == 1
    assert [_digest(line) for line in broken.digests()] == [
        _digest(line) for line in undisturbed.digests()
    ]
    assert [json.loads(line)["generation"] for line in broken.digests()] == [1] * number + [2] * (
        4 - number
    )


def _digest(line: str) -> Any:
    return json.loads(line)["digest"]


def test_an_undone_block_is_said_once_with_its_step_and_cause(broken: OneRank) -> None:
    train, _ = training(3, before_vote=at(1, break_links), after_block=recover)
    broken.train(train)
    (said,) = broken.said.of(StepAbortedEvent)
    assert (said.step, said.generation, said.cause) == (1, 1, "a link broke")


def test_an_abort_passes_every_except_of_user_code_for_errors(broken: OneRank) -> None:
    caught: list[str] = []

    def train(ctx: Context) -> None:
        script = Script(ctx)
        breaks = at(1, break_links)
        for step in ctx.steps(2):
            with step:
                script.backward()
                breaks(step, script)
                try:
                    script.update()
                except Exception:
                    caught.append("error")
            recover(step, script)

    broken.train(train)
    assert caught == []
    assert broken.said.of(StepAbortedEvent)


def test_an_abort_that_user_code_swallows_undoes_the_block_all_the_same(broken: OneRank) -> None:
    gates: list[str] = []

    def train(ctx: Context) -> None:
        script = Script(ctx)
        breaks = at(0, break_links)
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
            recover(step, script)

    broken.train(train)
    # Two shadow steps and the undone attempt, at both gates of each.
    assert gates == [StepAborted.__name__] * 6
    assert len(broken.digests()) == 1


def test_an_error_that_comes_of_a_broken_generation_is_no_error_of_the_user(
    broken: OneRank,
) -> None:
    def fail(step: Step, script: Script) -> None:
        break_links(step, script)
        raise ValueError("the loss is zero")

    train, given = training(2, before_vote=at(1, fail), after_block=recover)
    broken.train(train)
    assert [s.committed for s in given] == [True, False, True]
    assert "the loss is zero" in broken.said.of(StepAbortedEvent)[0].cause


def test_an_error_in_a_healthy_generation_is_the_users(one: OneRank) -> None:
    def fail(step: Step, script: Script) -> None:
        raise ValueError("the loss is zero")

    train, given = training(2, before_vote=at(1, fail))
    with pytest.raises(ValueError, match="the loss is zero"):
        one.train(train)
    assert not given[-1].committed
    assert one.said.of(StepAbortedEvent) == []


def test_ctrl_c_is_never_taken_for_an_abort(broken: OneRank) -> None:
    def interrupt(step: Step, script: Script) -> None:
        break_links(step, script)
        raise KeyboardInterrupt

    train, _ = training(2, before_vote=at(1, interrupt))
    with pytest.raises(KeyboardInterrupt):
        broken.train(train)


def test_what_stands_after_a_step_runs_once_when_it_is_committed(broken: OneRank) -> None:
    ran: list[int] = []

    def train(ctx: Context) -> None:
        script = Script(ctx)
        breaks = at(1, break_links)
        for step in ctx.steps(3):
            with step:
                script.backward()
                ctx.after(step, lambda step=step: ran.append(step.number))  # type: ignore[misc]
                breaks(step, script)
                script.update()
                assert step.number not in ran
            recover(step, script)

    broken.train(train)
    assert BROKEN == [1]
    assert ran == [0, 1, 2]


def test_a_collective_that_is_cut_off_after_the_vote_makes_the_rank_dirty(
    broken: OneRank,
) -> None:
    def log_loss(step: Step, script: Script) -> None:
        break_links(step, script)
        dist.all_reduce(torch.ones(1))
        raise AssertionError("communicated without a generation")

    def leave(step: Step, script: Script) -> None:
        if BROKEN:
            broken.retire()

    train, given = training(3, after_vote=at(1, log_loss), after_block=leave)
    with pytest.raises(Retired):
        broken.train(train)
    assert [s.committed for s in given] == [True, True]
    answer = broken.seat.answer()
    assert (answer.committed, answer.dirty) == (2, True)
    assert broken.said.of(StepAbortedEvent)[0].step == 2


# ---- what does not belong where it stands


def test_collectives_between_blocks_are_refused_and_show_the_move(one: OneRank) -> None:
    def between(step: Step, script: Script) -> None:
        with pytest.raises(RuntimeError, match="got all_reduce .* outside"):
            dist.all_reduce(torch.ones(1))

    train, _ = training(2, after_block=between)
    performance: list[Any] = []

    def before_and_after(ctx: Context) -> None:
        dist.all_reduce(torch.ones(1))
        train(ctx)
        between(Step(ctx._run, 0, closing=False, shadow=False), Script(ctx))
        dist.barrier()  # habit
        performance.append(ctx._run)

    one.train(before_and_after)
    assert performance


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
    assert late == [["rng.torch"]]


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
        for ask in (lambda: ctx.rank, lambda: ctx.coordinate("dp")):
            with pytest.raises(RuntimeError, match="is not known before the first step"):
                ask()
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


# ---- faults at the points of a step


def test_the_points_of_a_step_come_in_the_order_of_the_grammar(tmp_path: Path) -> None:
    points = [p for p in POINTS if p != "frame"]  # one rank sends no frames
    faults = [f"cut:rank=0,step={2 if p == 'end' else 1},at={p}" for p in points]
    one = OneRank(tmp_path, faults=";".join(faults))
    one.train(training(2)[0])
    one.close()
    injected = one.said.of(FaultInjected)
    assert [fault.at for fault in injected] == points
    assert [fault.step for fault in injected] == [1] * (len(points) - 1) + [2]


def test_the_point_in_the_optimizer_is_half_an_update(tmp_path: Path) -> None:
    one = OneRank(tmp_path, faults="cut:rank=0,step=1,at=optimizer")
    changed: list[bool] = []

    def train(ctx: Context) -> None:
        script = Script(ctx)
        parameters = list(script.model.parameters())

        def look(event: object) -> None:
            if isinstance(event, FaultInjected):
                pairs = zip(parameters, before, strict=True)
                changed.extend(not torch.equal(p, b) for p, b in pairs)

        one.said.listen = look
        for step in ctx.steps(2):
            with step:
                before = [p.detach().clone() for p in parameters]
                script.backward()
                script.update()
        assert script.optimizer.param_groups[0]["params"] == parameters

    one.train(train)
    one.close()
    assert changed == [True] * 3 + [False] * 3


# ---- held: voted, and the result did not come


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
            peer.links.data.connect("0-1#0", WITHIN_S)
            peer.vote.rebuddy(1, 0, peer.parts())
            with pytest.raises(ConnectionError):
                peer.voted(hit=cut)

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
                    rank.seat.retire(decided_to_leave())

        future = two.pool.submit(other)
        role = live(switch(1, two.members), 1)
        with pytest.raises(Retired):
            perform(train, environment(folder, 1, 2), role, rank.seat, rank.links, said)
        future.result(WITHIN_S)
    (step,) = given
    return step, rank, said, undone


def decided_to_leave() -> Any:
    from trainmover.schemas.commands import Retire

    return Retire(reason="test")


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
