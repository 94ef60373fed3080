"""Faults fire at the points of a real step that their names say."""

from pathlib import Path

import pytest
import torch
from tests.unit.one_rank import OneRank
from tests.unit.training_script import Script, training

from trainmover.runtime.context import Context
from trainmover.schemas.events import FaultInjected
from trainmover.schemas.fault import POINTS

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of"),  # shadow steps never step
    pytest.mark.usefixtures("process"),
]


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


def test_the_point_in_the_forward_is_inside_the_model(tmp_path: Path) -> None:
    one = OneRank(tmp_path, faults="cut:rank=0,step=0,at=forward")
    entered: list[str] = []

    def train(ctx: Context) -> None:
        script = Script(ctx)
        script.model.register_forward_pre_hook(lambda *_: entered.append("model"))
        script.model[0].register_forward_pre_hook(lambda *_: entered.append("first layer"))
        for step in ctx.steps(1):
            with step:
                entered.clear()
                script.backward()
                script.update()

    at_the_fault: list[list[str]] = []
    one.said.listen = lambda event: (
        at_the_fault.append(list(entered)) if isinstance(event, FaultInjected) else None
    )
    one.train(train)
    one.close()
    assert at_the_fault == [["model"]]
