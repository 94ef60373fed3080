"""No optimizer changes anything before the vote of its step, however it is called."""

from collections.abc import Iterator

import pytest
import torch
from torch.optim.optimizer import Optimizer

from trainmover.runtime.aborts import StepAborted
from trainmover.runtime.gate import Gate


class Block:
    """An open block that remembers what the parameter and its gradient were at each vote."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter
        self.seen: list[tuple[float, float | None]] = []
        self.commits = True

    def ready(self, optimizer: Optimizer | None = None) -> None:
        grad = self.parameter.grad
        self.seen.append((self.parameter.item(), None if grad is None else grad.item()))
        if not self.commits:
            raise StepAborted("test")


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.close()


@pytest.fixture
def parameter() -> torch.Tensor:
    made = torch.tensor(1.0, requires_grad=True)
    made.grad = torch.tensor(1.0)
    return made


@pytest.fixture
def optimizer(parameter: torch.Tensor) -> torch.optim.SGD:
    return torch.optim.SGD([parameter], lr=0.5)


@pytest.fixture
def block(gate: Gate, parameter: torch.Tensor, optimizer: torch.optim.SGD) -> Block:
    made = Block(parameter)
    gate.watch((optimizer,))
    gate.running, gate.block = True, made
    return made


def test_the_vote_comes_before_the_update(optimizer: torch.optim.SGD, block: Block) -> None:
    optimizer.step()
    assert block.seen == [(1.0, 1.0)]
    assert block.parameter.item() == 0.5


def test_an_update_that_is_voted_down_changes_nothing(
    optimizer: torch.optim.SGD, block: Block
) -> None:
    block.commits = False
    with pytest.raises(StepAborted):
        optimizer.step()
    assert block.parameter.item() == 1.0
    assert optimizer.state_dict()["state"] == {}


def test_a_hook_that_the_user_registers_later_still_runs_before_the_vote(
    optimizer: torch.optim.SGD, block: Block
) -> None:
    def clip(optimizer: Optimizer, args: object, kwargs: object) -> None:
        assert block.parameter.grad is not None
        block.parameter.grad.fill_(0.25)

    for hook in (clip, clip):
        optimizer.register_step_pre_hook(hook)
        optimizer.step()
    assert [grad for _, grad in block.seen] == [0.25, 0.25]


def test_a_tracked_optimizer_that_is_watched_twice_votes_once(
    gate: Gate, optimizer: torch.optim.SGD, block: Block
) -> None:
    gate.watch((optimizer,))
    optimizer.step()
    assert len(block.seen) == 1


@pytest.mark.parametrize("keyword", [False, True])
def test_a_closure_is_voted_on_after_its_backward_and_before_the_update(
    optimizer: torch.optim.SGD, block: Block, keyword: bool
) -> None:
    def closure() -> float:
        assert block.seen == []
        optimizer.zero_grad()
        loss = 3 * block.parameter
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    assert (optimizer.step(closure=closure) if keyword else optimizer.step(closure)) == 3.0
    assert block.seen == [(1.0, 3.0)]
    assert block.parameter.item() == -0.5


def test_an_optimizer_that_evaluates_its_closure_again_is_refused(
    gate: Gate, parameter: torch.Tensor, block: Block
) -> None:
    lbfgs = torch.optim.LBFGS([parameter])
    gate.watch((lbfgs,))

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = (parameter - 3).square()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with pytest.raises(RuntimeError, match=r"LBFGS evaluates its closure more than once"):
        lbfgs.step(closure)  # type: ignore[no-untyped-call]
    assert len(block.seen) == 1


def test_an_untracked_optimizer_in_a_block_is_an_error_that_shows_the_line_to_add(
    parameter: torch.Tensor, block: Block
) -> None:
    with pytest.raises(RuntimeError, match=r"Adam is .*not tracked.*ctx\.track\(optimizer="):
        torch.optim.Adam([parameter]).step()
    assert parameter.item() == 1.0
    assert block.seen == []


def test_an_update_outside_a_block_is_an_error_once_the_loop_runs(
    gate: Gate, parameter: torch.Tensor, optimizer: torch.optim.SGD
) -> None:
    gate.watch((optimizer,))
    optimizer.step()  # in set-up
    assert parameter.item() == 0.5
    gate.running = True
    for each in (optimizer, torch.optim.SGD([parameter])):
        with pytest.raises(RuntimeError, match="outside `with step:`"):
            each.step()
    assert parameter.item() == 0.5


def test_an_optimizer_inside_a_backward_is_an_error_that_says_when_to_step_it(
    optimizer: torch.optim.SGD, block: Block
) -> None:
    def step(_: torch.Tensor) -> None:
        optimizer.step()

    block.parameter.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match=r"inside a backward.*after backward\(\) has returned"):
        (2 * block.parameter).backward()  # type: ignore[no-untyped-call]
    assert block.parameter.item() == 1.0
    assert block.seen == []


def test_a_closed_gate_leaves_no_hook_behind(
    gate: Gate, optimizer: torch.optim.SGD, block: Block
) -> None:
    gate.close()
    optimizer.step()
    torch.optim.SGD([block.parameter]).step()
    assert block.seen == []
