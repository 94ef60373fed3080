"""Shadow steps communicate and are taped where all ranks are set up together, nowhere else."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.unit.linked_ranks import WITHIN_S, Rank, engine_of, world
from tests.unit.one_rank import OneRank
from tests.unit.training_script import Script
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainmover.runtime.context import Context
from trainmover.runtime.engine import LinkEngine
from trainmover.runtime.exchange import CollectiveMismatch
from trainmover.runtime.groups import LinkGroup
from trainmover.runtime.performance import Performance
from trainmover.runtime.recovery import Rerun, Retired
from trainmover.runtime.shadow import MIN_SHADOW, NUMBERS_APART
from trainmover.runtime.step import Step
from trainmover.runtime.tape import TapeMismatch
from trainmover.schemas.events import RankReady, StandbyWarmed

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of"),  # shadow steps never step
    pytest.mark.usefixtures("process"),
]

Do = Callable[[Context, Step], None]


def asking(*, steps: int = 1, more: Do = lambda ctx, step: None) -> Callable[[Context], None]:
    """A script that reduces a number in set-up, its step's number in steps, and more in some."""

    def train(ctx: Context) -> None:
        script = Script(ctx)
        dist.all_reduce(torch.tensor([42]))
        count = 0
        for step in ctx.steps(steps):
            with step:
                count += 1
                dist.all_reduce(torch.tensor([count], dtype=torch.int32))
                more(ctx, step)
                script.backward()
                script.update()

    return train


def world_of(ctx: Context) -> LinkEngine:
    group = dist.group.WORLD
    assert isinstance(group, LinkGroup)
    return group.engine


def run_of(ctx: Context) -> Performance:
    run = ctx._run
    assert isinstance(run, Performance)
    return run


# ---- the tape of a live set-up


def test_set_up_and_shadow_steps_are_taped_and_real_steps_are_not(one: OneRank) -> None:
    one.train(asking(steps=3))
    (tape,) = one.shelf.tapes
    (world,) = tape.groups
    assert [str(e) for e in world] == [
        "all_reduce of torch.int64 [1]",
        *["all_reduce of torch.int32 [1]"] * 2,
    ]
    assert [e.values[0].item() for e in world] == [42, 1, 2]
    assert tape.starts == ((1,), (2,))
    (ready,) = one.said.of(RankReady)
    assert ready.tape == "@1"


def test_the_hook_is_there_until_the_last_shadow_step_is_over(one: OneRank) -> None:
    hooked: list[tuple[bool, bool]] = []
    one.train(
        asking(more=lambda ctx, step: hooked.append((step.shadow, "issue" in vars(world_of(ctx)))))
    )
    assert hooked == [(True, True), (True, True), (False, False)]


def test_a_standby_tapes_nothing(one: OneRank) -> None:
    with pytest.raises(Retired):
        one.stand_by(asking(more=lambda ctx, step: one.retire() if step.shadow else None))
    assert one.shelf.tapes == []


def test_shadow_steps_of_a_live_set_up_run_their_collectives(one: OneRank) -> None:
    seen: list[int] = []
    one.train(asking(more=lambda ctx, step: seen.append(world_of(ctx).issued)))
    assert seen == [step * NUMBERS_APART + 1 for step in (1, 2, 3)]


def test_a_trace_that_goes_on_changing_takes_five_steps(one: OneRank) -> None:
    shadows: list[int] = []

    def more(ctx: Context, step: Step) -> None:
        if step.shadow:
            shadows.append(len(shadows))
            dist.all_reduce(torch.zeros(len(shadows)))

    one.train(asking(more=more))
    assert len(shadows) == 5


def test_what_nobody_received_in_a_shadow_step_is_taken_for_nothing_of_the_next(
    tmp_path: Path,
) -> None:
    sent = threading.Event()

    def perform(rank: Rank) -> None:
        engine = engine_of(rank, 2)
        group = LinkGroup(engine)
        engine.count_from(NUMBERS_APART)
        if rank.rank == 0:
            group.send([torch.ones(1)], 1)  # behind its vote rank 1 would have received it
            engine.settle()
            sent.set()
        engine.count_from(2 * NUMBERS_APART)
        if rank.rank == 1:
            assert sent.wait(WITHIN_S)
            with pytest.raises(CollectiveMismatch, match=r"SEND number 2097153 .* 1048577"):
                group.recv([torch.ones(1)], 0).wait()
        engine.close(WITHIN_S)

    with world(tmp_path, 2) as two:
        two.all(perform)


# ---- cut


def test_a_set_up_that_is_cut_in_a_shadow_step_starts_over(one: OneRank) -> None:
    def cut(ctx: Context, step: Step) -> None:
        one.break_links()
        dist.all_reduce(torch.zeros(1))
        raise AssertionError("the generation has ended")

    with pytest.raises(Rerun):
        one.train(asking(more=cut))
    assert one.said.of(RankReady) == []
    assert not one.seat.answer().set_up


def test_what_a_script_makes_of_zeros_in_a_cut_shadow_step_is_no_error_of_its_own(
    one: OneRank,
) -> None:
    def cut(ctx: Context, step: Step) -> None:
        one.break_links()
        raise ZeroDivisionError

    with pytest.raises(Rerun):
        one.train(asking(more=cut))


def test_a_set_up_that_is_cut_while_ranks_agree_on_its_end_starts_over(one: OneRank) -> None:
    shadows: list[Step] = []

    def train(ctx: Context) -> None:
        script = Script(ctx)
        for step in ctx.steps(1):
            shadows.append(step)
            with step:
                script.backward()
                script.update()
            if len(shadows) == MIN_SHADOW:
                one.break_links()

    with pytest.raises(Rerun):
        one.train(train)
    assert len(shadows) == MIN_SHADOW


# ---- a standby with a tape


@pytest.fixture
def other(one: OneRank, tmp_path: Path) -> Iterator[OneRank]:
    """A worker that stands by for `one`."""
    (tmp_path / "standby").mkdir()
    made = OneRank(tmp_path / "standby")
    yield made
    one.retire()
    made.close()


def test_a_standby_gets_the_outputs_that_its_role_class_had(one: OneRank, other: OneRank) -> None:
    def adopt(ctx: Context, step: Step) -> None:
        given = torch.tensor([7 if run_of(ctx).role.live else 0])
        dist.all_reduce(given)
        seen.append(given.item())

    seen: list[float] = []
    one.train(asking(more=adopt))
    assert seen == [7, 7, 7]
    seen.clear()

    def retire(ctx: Context, step: Step) -> None:
        adopt(ctx, step)
        if run_of(ctx).let_update:
            other.retire()

    with pytest.raises(Retired):
        other.stand_by(asking(more=retire), tape=one.shelf.tapes[0])
    assert seen == [7, 7, 7]
    (warmed,) = other.said.of(StandbyWarmed)
    assert (warmed.replayed, warmed.steps) == (True, 3)


def test_a_standby_that_does_something_else_says_what(one: OneRank, other: OneRank) -> None:
    one.train(asking())

    def more(ctx: Context, step: Step) -> None:
        try:
            dist.all_reduce(torch.zeros(2))
        except Exception:
            pytest.fail("no except of user code catches it")
        if run_of(ctx).let_update:
            other.retire()

    with pytest.raises(TapeMismatch, match=r"end of shadow step 0, got all_reduce of .* \[2\]"):
        other.stand_by(asking(more=more), tape=one.shelf.tapes[0])


def test_a_difference_inside_a_backward_of_ddp_unwinds_train(one: OneRank, other: OneRank) -> None:
    def ddp(*, find_unused: bool) -> Callable[[Context], None]:
        def train(ctx: Context) -> None:
            model = DistributedDataParallel(nn.Linear(4, 1), find_unused_parameters=find_unused)
            optimizer = torch.optim.SGD(model.parameters())
            ctx.track(model=model, optimizer=optimizer)
            for step in ctx.steps(1):
                with step:
                    torch.autograd.backward(model(torch.ones(2, 4)).sum())
                    if run_of(ctx).let_update:
                        other.retire()
                    optimizer.step()
                    optimizer.zero_grad()

        return train

    one.train(ddp(find_unused=False))
    with pytest.raises(TapeMismatch, match=r"got all_reduce of torch\.int32 \[2\]"):
        other.stand_by(ddp(find_unused=True), tape=one.shelf.tapes[0])
