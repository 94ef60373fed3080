"""An undone block leaves no trace, and a joiner continues bit for bit where its donor was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from trainmover.runtime import rng
from trainmover.runtime.batches import Batches
from trainmover.runtime.codec import Unmovable
from trainmover.runtime.tracked import Tracked


class Rank:
    """A training script with everything that can go wrong in it."""

    def __init__(self, seed: int = 0, *, track_scheduler: bool = True) -> None:
        rng.seed_all(seed)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)
        )
        self.model.register_buffer("mask", torch.zeros(2), persistent=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = LambdaLR(self.optimizer, lambda n: 1 / (n + 1))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        items = TensorDataset(torch.arange(40.0).view(10, 4) / 40)
        self.data = Batches(DataLoader(items, batch_size=4, shuffle=True), 3, lambda: None)
        self.tracked = Tracked()
        self.tracked.add(model=self.model, optimizer=self.optimizer, scaler=self.scaler)
        if track_scheduler:
            self.tracked.add(scheduler=self.scheduler)
        self.tracked.add_batches(self.data)
        self.tracked.vars["losses"] = []
        if track_scheduler:
            self.tracked.check()

    def block(self, *, skip: bool = False, repeat: bool = False) -> None:
        """One step; the vote would stand before scaler.step."""
        self.backward()
        if not skip:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def backward(self) -> None:
        (batch,) = next(self.data)
        loss = self.model(batch).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.tracked.vars["losses"].append(float(loss.detach()))
        self.model.get_buffer("mask").add_(1)

    def step(self) -> None:
        self.tracked.open()
        self.block()


def trained(steps: int, seed: int = 0) -> Rank:
    rank = Rank(seed)
    for _ in range(steps):
        rank.step()
    return rank


def give(donor: Tracked, joiner: Tracked) -> None:
    """What transfer does, without a socket."""
    shared = donor.shared()
    for theirs, mine in zip(shared.tensors, joiner.receive(shared.meta), strict=True):
        mine.copy_(theirs)
    joiner.received()
    joiner.load_own(donor.own())


@pytest.mark.filterwarnings("ignore:Detected call of")  # the optimizer of an undone step 0
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_block_that_is_undone_and_run_again_counts_once(steps: int) -> None:
    expected = trained(steps + 1).tracked.state_digest()
    rank = trained(steps)
    rank.tracked.open()
    before = rank.tracked.state_digest()
    for _ in range(2):
        rank.backward()
        # between vote and abort nothing tracked but these may have moved
        rank.optimizer.param_groups[0]["lr"] = 7.0
        rank.scheduler.step()
        assert rank.tracked.state_digest() != before
        rank.tracked.undo()
        assert rank.tracked.state_digest() == before
        rank.tracked.open()
    rank.block()
    assert rank.tracked.state_digest() == expected


def test_an_undo_brings_gradients_back_to_none_or_to_zero_in_place() -> None:
    rank = trained(1)
    weight, bias = (rank.model.get_parameter(f"0.{name}") for name in ("weight", "bias"))
    zero = bias.grad = torch.zeros_like(bias)
    rank.tracked.open()
    rank.backward()
    bias.grad = None
    zero.fill_(3)
    rank.tracked.undo()
    assert weight.grad is None
    assert bias.grad is zero
    assert not zero.any()


def test_an_undo_restores_a_buffer_that_was_replaced_or_made_in_the_block() -> None:
    rank = trained(1)
    old = rank.model.get_buffer("mask")
    rank.tracked.open()
    content = old.clone()
    rank.model.mask = torch.ones(5)
    rank.model.register_buffer("late", torch.ones(1))
    old.fill_(9)
    rank.tracked.undo()
    assert rank.model.mask is old
    assert torch.equal(old, content)
    assert not hasattr(rank.model, "late")


def test_a_gradient_left_from_before_the_block_is_an_error_that_names_it() -> None:
    rank = trained(1)
    rank.backward()
    with pytest.raises(ValueError, match=r"model\.0\.weight .*inside the block"):
        rank.tracked.open()


def test_own_state_that_rests_is_the_same_bytes_and_what_moves_is_noticed() -> None:
    rank = trained(1)
    before = rank.tracked.own()
    rank.tracked.open()
    rests = rank.tracked.own_at_opening()
    assert rests == before
    assert all(rests[name] is before[name] for name in before if name.startswith("rng."))
    torch.rand(1)
    rank.tracked.open()
    now = rank.tracked.own_at_opening()
    assert {name for name in now if now[name] != before[name]} == {"rng.cpu"}
    assert rests == before


def skipped(rank: Rank) -> None:
    rank.tracked.open()
    rank.block(skip=True)


def repeated_sample(rank: Rank) -> None:
    rank.data.load_position(b"[0, 0, 10, 4, false]")
    rank.step()


def other_dropout(rank: Rank) -> None:
    state = rng.capture()
    torch.manual_seed(99)
    rank.step()
    rng.restore(state)


@pytest.mark.parametrize("fault", [skipped, repeated_sample, other_dropout])
def test_a_fault_changes_the_digest(fault: Callable[[Rank], None]) -> None:
    good, bad = trained(2), trained(1)
    assert trained(1).tracked.state_digest() == bad.tracked.state_digest()
    fault(bad)
    assert bad.tracked.state_digest() != good.tracked.state_digest()


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_an_untracked_scheduler_changes_the_digest_after_an_undo() -> None:
    digests = set()
    for undone in (False, True):
        rank = Rank(track_scheduler=False)
        if undone:
            rank.tracked.open()
            rank.backward()
            rank.scheduler.step()
            rank.tracked.undo()
        rank.step()
        digests.add(rank.tracked.state_digest())
    assert len(digests) == 2


@pytest.mark.parametrize("donor_steps", [0, 1, 4])
@pytest.mark.parametrize("joiner_steps", [0, 2])
def test_a_joiner_continues_bit_for_bit(donor_steps: int, joiner_steps: int) -> None:
    joiner = trained(joiner_steps, seed=1)
    donor = trained(donor_steps)
    digest = donor.tracked.state_digest()
    give(donor.tracked, joiner.tracked)
    assert joiner.tracked.shared_digest() == donor.tracked.shared_digest()
    assert joiner.tracked.state_digest() == digest
    joiner.step()
    after = joiner.tracked.state_digest()
    assert after == trained(donor_steps + 1).tracked.state_digest()


def test_a_step_of_a_low_precision_optimizer_state_keeps_its_dtype() -> None:
    """load_state_dict would cast float32 state to the dtype of the bfloat16 parameter."""

    def make() -> tuple[nn.Linear, torch.optim.Optimizer, Tracked]:
        model = nn.Linear(2, 2, dtype=torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5), momentum=0.9)
        tracked = Tracked()
        tracked.add(model=model, optimizer=optimizer)
        return model, optimizer, tracked

    model, optimizer, donor = make()
    optimizer.state[model.weight]["master"] = torch.rand(2, 2)
    _, joiner_optimizer, joiner = make()
    rate = joiner_optimizer.param_groups[0]["lr"]
    rate.fill_(0.1)
    give(donor, joiner)
    assert joiner.shared_digest() == donor.shared_digest()
    assert joiner_optimizer.param_groups[0]["lr"] is rate  # the tensor that a compiled step reads
    assert rate.item() == 0.5


def test_an_undo_fills_a_learning_rate_tensor_in_place() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))
    tracked = Tracked()
    tracked.add(model=model, optimizer=optimizer)
    rate = optimizer.param_groups[0]["lr"]
    tracked.open()
    rate.fill_(3)
    optimizer.param_groups[0]["new"] = 1
    tracked.undo()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5
    assert "new" not in optimizer.param_groups[0]


@pytest.mark.parametrize("warm", [False, True])
def test_a_declared_optimizer_is_written_back_when_the_block_is_undone(warm: bool) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    tracked = Tracked()
    tracked.add(model=model, d_opt=optimizer, undo=("d_opt",))

    def update() -> None:
        model(torch.ones(1, 2)).sum().backward()
        assert tracked.before_first_optimizer(optimizer)
        optimizer.step()
        optimizer.zero_grad()

    tracked.open()
    if warm:
        update()
        tracked.open()
    before = tracked.shared_digest()
    update()
    update()
    tracked.undo()
    assert tracked.shared_digest() == before
    assert not tracked.before_first_optimizer(torch.optim.SGD([torch.ones(1)]))


class Average:
    """An object of the user's whose state_dict has tensors."""

    def __init__(self, value: float) -> None:
        self.state: dict[str, Any] = {"mean": torch.full((3,), value), "names": ("a", 1)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_an_object_with_tensors_in_its_state_moves() -> None:
    donor, joiner = Tracked(), Tracked()
    mine = Average(0.0)
    donor.add(average=Average(2.0))
    joiner.add(average=mine)
    give(donor, joiner)
    assert mine.state["mean"].tolist() == [2.0] * 3
    assert mine.state["names"] == ("a", 1)
    assert joiner.state_digest() == donor.state_digest()


def test_ddp_and_compile_wrappers_do_not_show_in_names_and_digest() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        wrappers: list[Any] = [
            model,
            torch.compile(model, backend="eager"),
            nn.parallel.DistributedDataParallel(model),
        ]
        digests = set()
        for wrapper in wrappers:
            tracked = Tracked()
            tracked.add(model=wrapper)
            digests.add(tracked.state_digest())
        assert len(digests) == 1
    finally:
        dist.destroy_process_group()


def test_the_digest_ignores_the_order_in_which_objects_and_variables_were_named() -> None:
    one, two = Tracked(), Tracked()
    model, other = nn.Linear(2, 2), nn.Linear(1, 1)
    one.add(a=model, b=other)
    two.add(b=other, a=model)
    one.vars.update(x=1, y=2)
    two.vars.update(y=2, x=1)
    assert one.state_digest() == two.state_digest()


def test_what_cannot_be_tracked_is_refused_with_the_reason() -> None:
    tracked = Tracked()
    with pytest.raises(TypeError, match=r"names is a list; ctx.track takes modules.*ctx.vars"):
        tracked.add(names=["a"])
    with pytest.raises(ValueError, match=r"\[a-z_\]"):
        tracked.add(Model=nn.Linear(1, 1))
    tracked.add(model=nn.Linear(1, 1))
    with pytest.raises(ValueError, match="tracked already"):
        tracked.add(model=nn.Linear(1, 1))
    with pytest.raises(ValueError, match="undo='model'"):
        tracked.add(undo=("model",))
    bad = Average(0.0)
    bad.state["f"] = [print]
    with pytest.raises(Unmovable, match=r"average\['f'\]\[0\]"):
        tracked.add(average=bad)
    tracked.vars["x"] = {"y": object()}
    with pytest.raises(Unmovable, match=r"vars\['x'\]\['y'\]"):
        tracked.own()


def test_parameters_that_no_tracked_module_has_are_named() -> None:
    model = nn.Linear(2, 2)
    head = nn.Parameter(torch.ones(3))
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [head]}]
    optimizer = torch.optim.SGD(groups)
    tracked = Tracked()
    tracked.add(model=model, opt=optimizer)
    with pytest.raises(ValueError, match=r"opt\.param_groups\[1\]\['params'\]\[0\] of shape \[3\]"):
        tracked.check()


def test_a_joiner_that_is_built_otherwise_is_told_where() -> None:
    def make(n: int, **more: Any) -> Tracked:
        tracked = Tracked()
        tracked.add(model=nn.Linear(2, n), **more)
        return tracked

    with pytest.raises(ValueError, match=r"model\.weight: expected .*\[3, 2\].*got .*\[2, 2\]"):
        give(make(3), make(2))
    with pytest.raises(ValueError, match=r"objects: the donor has \['average'\]"):
        give(make(2, average=Average(0.0)), make(2))
    donor = make(2)
    donor._modules["model"].register_buffer("late", torch.ones(1))
    with pytest.raises(ValueError, match=r"buffers \['model.late'\] do not exist here"):
        give(donor, make(2))


def test_a_scheduler_that_drives_a_tracked_optimizer_has_to_be_tracked_too() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    tracked = Tracked()
    tracked.add(model=model, opt=optimizer)
    with pytest.raises(ValueError, match="drives the tracked optimizer 'opt' but is not tracked"):
        tracked.check()
    tracked.add(scheduler=scheduler)
    tracked.check()


def test_schedulers_inside_a_tracked_scheduler_count_as_tracked() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.1)
    then = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, then], milestones=[5])
    tracked = Tracked()
    tracked.add(model=model, optimizer=optimizer, scheduler=both)
    tracked.check()
