"""A script without a job: the same bits, numbers and refusals as in one, and no more said."""

import io
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.unit.one_rank import OneRank
from tests.unit.training_script import Script, at, training

from trainmover.runtime import run as running
from trainmover.runtime import telling
from trainmover.runtime.context import Context
from trainmover.runtime.plain_groups import Launched
from trainmover.runtime.step import Step
from trainmover.runtime.telling import Telling
from trainmover.runtime.unprotected import Place
from trainmover.schemas.digest import of_job

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of"),  # shadow steps never step
    pytest.mark.usefixtures("process", "alone"),
]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an agent nor torchrun has set anything."""
    for name in ("TRAINMOVER_WORKER", "TRAINMOVER_LAYOUT", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def everything(losses: list[str]) -> Callable[[Context], None]:
    """Random numbers before and after the update, a late stop, a closing block."""

    def train(ctx: Context) -> None:
        script = Script(ctx)
        ctx.on_assigned(lambda: ctx.vars.update(drawn=torch.rand(1).item()))
        for step in ctx.steps(9, closing=True):
            with step:
                if step.closing:
                    ctx.vars["closed"] = torch.rand(1).item()
                    continue
                loss = script.backward()
                script.update()
                if step.number == 3:
                    step.stop()  # counts for the next step: this one's vote is over
                ctx.after(step, partial(losses.append, float(loss).hex()))

    return train


# ---- as in a job


def test_one_rank_alone_comes_to_the_same_bits_as_in_a_job(
    one: OneRank, capfd: pytest.CaptureFixture[str]
) -> None:
    in_job: list[str] = []
    performance = one.train(everything(in_job))
    alone: list[str] = []
    running.run(everything(alone))
    assert len(alone) == 5
    assert alone == in_job
    state = of_job([performance.digest])
    assert f"trainmover: completed: 5 steps, state {state}" in capfd.readouterr().err


def test_steps_and_context_are_what_a_job_gives() -> None:
    train, given = training(2, closing=True)
    seen: list[Any] = []

    def looking(ctx: Context) -> None:
        seen.append((ctx.rank, ctx.world_size, ctx.local_rank, ctx.generation, ctx.shadow))
        seen.append((str(ctx.layout), ctx.size("dp"), ctx.coordinate("dp"), str(ctx.device)))
        seen.append((ctx.group("dp").size(), ctx.mesh.mesh_dim_names))
        with ctx.long_operation(5):
            train(ctx)

    running.run(looking)
    assert seen == [(0, 1, 0, 1, False), ("dp=1", 1, 0, "cpu"), (1, ("dp",))]
    assert [(s.number, s.closing, s.committed, s.shadow) for s in given] == [
        (0, False, True, False),
        (1, False, True, False),
        (2, True, True, False),
    ]


@pytest.mark.parametrize("closing", [False, True])
def test_stop_before_the_update_ends_the_loop_after_its_step(closing: bool) -> None:
    train, given = training(9, closing=closing, before_vote=at(1, lambda s, _: s.stop()))
    running.run(train)
    assert [s.number for s in given if not s.closing] == [0, 1]
    assert [s.closing for s in given] == [False, False] + [True] * closing


def test_collectives_of_one_rank_give_what_a_group_of_one_gives() -> None:
    found: dict[str, list[float]] = {}

    def train(ctx: Context) -> None:
        x = torch.arange(2.0)
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        found["reduced"] = x.tolist()
        rows = [torch.zeros(2)]
        dist.all_gather(rows, x)
        found["gathered"] = rows[0].tolist()
        piece = torch.zeros(2)
        dist.reduce_scatter(piece, [x])
        found["scattered"] = piece.tolist()
        dist.broadcast(x, 0)
        dist.barrier()
        training(1)[0](ctx)

    running.run(train)
    assert list(found) == ["reduced", "gathered", "scattered"]
    assert all(values == [0.0, 1.0] for values in found.values())


# ---- what is refused


def between(do: Callable[[Script], Any]) -> Callable[[Context], None]:
    return training(2, after_block=lambda step, script: do(script))[0]


def within(do: Callable[[Script], Any]) -> Callable[[Context], None]:
    return training(2, before_vote=lambda step, script: do(script))[0]


def stray_update(script: Script) -> None:
    torch.optim.SGD(script.model.parameters(), 0.1).step()


def stray_gradient(script: Script) -> None:
    torch.autograd.backward(script.model(torch.ones(2, 4)).sum())


def without_its_scheduler(ctx: Context) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    ctx.track(model=model, optimizer=optimizer)
    for step in ctx.steps(1):
        with step:
            raise AssertionError("entered")


def leaving(ctx: Context) -> None:
    for step in ctx.steps(3):
        with step:
            break


def not_entering(ctx: Context) -> None:
    for _ in ctx.steps(2):
        pass


def twice(ctx: Context) -> None:
    for _ in range(2):
        for step in ctx.steps(1):
            with step:
                pass


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (between(lambda script: next(script.data)), r"move next\(data\) into the block"),
        (between(lambda script: script.optimizer.step()), "stepped outside `with step:`"),
        (between(lambda script: dist.all_reduce(torch.ones(1))), "got all_reduce .* outside"),
        (between(stray_gradient), "is not zero when the block opens"),
        (within(stray_update), "SGD is stepped in a block but not tracked"),
        (within(lambda script: script.ctx.vars.update(f=print)), r"vars\['f'\] is .* cannot move"),
        (without_its_scheduler, "a learning rate scheduler drives"),
        (leaving, r"call step\.stop\(\) to end early"),
        (not_entering, r"each step of ctx\.steps is entered"),
        (twice, r"ctx\.steps may be used once"),
        (lambda ctx: dist.init_process_group("gloo"), "default process group twice"),
    ],
)
def test_a_mistake_is_refused_as_in_a_job_and_leaves_no_group(
    train: Callable[[Context], None], words: str
) -> None:
    with pytest.raises((RuntimeError, ValueError, TypeError), match=words) as error:
        running.run(train)
    assert not dist.is_initialized()
    if "twice" in words and "group" in words:
        assert "remove init_process_group" in error.value.__notes__[0]


def test_the_promise_of_a_rebindable_script_is_checked() -> None:
    with pytest.raises(RuntimeError, match=r"ctx\.rank is not known before the first step"):
        running.run(lambda ctx: print(ctx.rank), rebindable=True)


def test_an_error_of_the_script_comes_out_and_its_step_is_not_committed() -> None:
    hooks: list[str] = []

    def wrong(step: Step, script: Script) -> None:
        script.ctx.after(step, lambda: hooks.append("after"))
        raise KeyError("user")

    train, given = training(3, before_vote=at(1, wrong))
    with pytest.raises(KeyError, match="user"):
        running.run(train)
    assert [s.committed for s in given] == [True, False]
    assert hooks == []
    assert not dist.is_initialized()


def test_habits_after_the_loop_are_allowed() -> None:
    def train(ctx: Context) -> None:
        training(1)[0](ctx)
        dist.barrier()
        dist.destroy_process_group()

    running.run(train)


def test_one_rank_alone_listens_nowhere() -> None:
    before = listening()
    seen: list[set[str]] = []

    def train(ctx: Context) -> None:
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        training(1, before_vote=lambda step, script: seen.append(listening()))[0](ctx)

    running.run(train)
    assert seen == [before]


def listening() -> set[str]:
    """Sockets of this process that wait for connections."""
    own = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(link))
        except FileNotFoundError:
            continue  # that of the listing itself
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return own & {f"socket:[{cells[9]}]" for cells in lines if cells[3] == "0A"}


# ---- which rank, and on what


def variables(rank: int, size: int, local_rank: int = 0, **others: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "MASTER_ADDR": "localhost",
        **others,
    }


def test_a_process_without_peers_is_rank_0_of_1() -> None:
    place = Place.read({"RANK": "1", "WORLD_SIZE": "2"})  # left over: nobody says where to meet
    assert (place.rank, place.local_rank, str(place.layout), place.launched) == (
        0,
        0,
        "dp=1",
        False,
    )
    assert place.in_words("train.py").startswith("one rank alone, unprotected")


def test_the_variables_of_torchrun_say_which_rank() -> None:
    place = Place.read(variables(5, 8, local_rank=1))
    assert (place.rank, place.local_rank, str(place.layout), place.launched) == (5, 1, "dp=8", True)
    assert "run --nproc-per-node 8 --standbys 1 train.py" in place.in_words("train.py")


def test_the_layout_comes_from_the_variable_of_run() -> None:
    place = Place.read(variables(5, 8, TRAINMOVER_LAYOUT="pp=2,dp=4"))
    assert place.layout.coordinates(place.rank) == (1, 1)


@pytest.mark.parametrize("environ", [{}, variables(0, 2)])
def test_a_layout_of_another_size_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"expected 8 ranks for .*--nproc-per-node 8"):
        Place.read({**environ, "TRAINMOVER_LAYOUT": "pp=2,dp=4"})


def test_with_cuda_a_launched_rank_has_nccl_on_its_own_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On fakes: it has never run on a GPU."""
    calls: list[Any] = []
    made_by: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: calls.append(backend))
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "new_group", lambda backend: made_by.append(backend))
    made = Launched(local_rank=3)
    assert calls == [torch.device("cuda:3"), "init", "nccl"]
    assert made.device == torch.device("cuda:3")
    assert made_by == ["gloo"]


# ---- what a person sees


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_line_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    told = Telling(silent=False)
    for steps, at_s in ((1, 10.4), (2, 10.9), (3, 11.0), (4, 11.9), (8, 13.0)):
        now[0] = at_s
        told.committed(steps, {"loss": 0.125, "tokens": 4096.0})
    assert terminal.getvalue().splitlines() == [
        "trainmover: step 3 loss 0.125 tokens 4096, 3.0 steps/s",
        "trainmover: step 8 loss 0.125 tokens 4096, 2.5 steps/s",
    ]


def test_other_ranks_and_files_get_no_progress(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telling, "LINE_EVERY_S", 0.0)
    Telling(silent=True).say("x")
    Telling(silent=False).committed(1, {})
    assert capfd.readouterr().err == ""


def test_what_is_said_is_how_it_began_and_how_it_ended(capfd: pytest.CaptureFixture[str]) -> None:
    running.run(training(2)[0])
    began, last, ended = capfd.readouterr().err.splitlines()
    assert began.startswith("trainmover: one rank alone, unprotected")
    assert last.startswith("trainmover: step 2 loss ")
    assert ended.startswith("trainmover: completed: 2 steps, state ")


def test_role_classes_are_taken_as_in_a_job_and_checked() -> None:
    seen: list[str] = []

    def train(ctx: Context) -> None:
        seen.append(ctx._run.role.role_class)
        training(1)[0](ctx)

    running.run(train, role_class=lambda rank, layout: f"{rank} of {layout}")
    assert seen == ["0 of dp=1"]
    with pytest.raises(ValueError, match=r"expected role_class\(rank, layout\) to return a name"):
        running.run(train, role_class=lambda rank, layout: "")
