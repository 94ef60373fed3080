"""A fault fires once, at its point, in the worker that it is meant for."""

import os
import signal
from pathlib import Path

import pytest

from trainmover.runtime.faults import Faults, parse_all
from trainmover.schemas.fault import Fault

Fired = list[tuple[str, object]]


class Drill(Faults):
    """Writes down what would have happened to the process."""

    def __init__(self, text: str, worker: str = "a") -> None:
        self.log: Fired = []
        super().__init__(
            text,
            worker,
            announce=lambda fault: self.log.append(("said", fault.at)),
            cut=lambda: self.log.append(("cut", None)),
        )


def fires(faults: Faults, rank: int, step: int, joined_at: int | None = None) -> bool:
    faults.arm(rank, step, joined_at)
    return faults.armed("forward") is not None


@pytest.mark.parametrize(
    "text",
    [
        "kill",
        "kill:rank=1",
        "kill:step=1",
        "kill:rank=1,step=x",
        "kill:rank=1,step=2,at=lunch",
        "kill:rank=1,step=2,colour=red",
        "kill:rank=1,step=2,worker=a",
        "maim:rank=1,step=2",
        "",
    ],
)
def test_a_fault_that_cannot_be_read_is_an_error_that_shows_the_form(text: str) -> None:
    with pytest.raises(ValueError, match=r"KIND:rank=R,step=S\[,at=POINT\].*kill, stop, cut") as e:
        Fault.parse(text)
    assert repr(text) in str(e.value)


def test_several_faults_stand_in_one_line() -> None:
    assert parse_all("kill:rank=1,step=5,at=vote;stop:worker=w1;") == [
        Fault("kill", rank=1, step=5, at="vote"),
        Fault("stop", worker="w1"),
    ]


def test_a_fault_is_armed_for_its_rank_and_step_only() -> None:
    faults = Drill("cut:rank=1,step=5")
    assert fires(faults, rank=1, step=5)
    assert not fires(faults, rank=0, step=5)
    assert not fires(faults, rank=1, step=4)


def test_the_joiner_of_a_step_does_not_fire_what_it_came_after() -> None:
    faults = Drill("cut:rank=1,step=5;cut:rank=1,step=6")
    assert not fires(faults, rank=1, step=5, joined_at=5)
    assert fires(faults, rank=1, step=6, joined_at=5)


def test_a_fault_for_a_worker_follows_it_to_any_rank() -> None:
    assert fires(Drill("cut:worker=a"), rank=3, step=9, joined_at=9)
    assert not fires(Drill("cut:worker=b"), rank=3, step=9)
    assert not fires(Drill("cut:worker=a,step=8"), rank=3, step=9)


def test_a_file_of_faults_is_read_again_at_each_step(tmp_path: Path) -> None:
    path = tmp_path / "faults"
    faults = Drill(f"@{path}")
    assert not fires(faults, rank=1, step=5)
    path.write_text("cut:rank=1,step=5\ncut:rank=1,step=6\n")
    assert fires(faults, rank=1, step=5)
    path.write_text("")
    assert not fires(faults, rank=1, step=6)


def test_a_fault_fires_once_and_is_said_before_it_happens() -> None:
    faults = Drill("cut:rank=1,step=5,at=vote")
    for _ in range(2):  # the step comes again
        faults.arm(1, 5, None)
        faults.hit("extras")
        faults.hit("vote")
        faults.hit("vote")
    assert faults.log == [("said", "vote"), ("cut", None)]


@pytest.mark.parametrize(("kind", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_a_process_is_stopped_by_a_signal_that_it_cannot_handle(
    monkeypatch: pytest.MonkeyPatch, kind: str, number: signal.Signals
) -> None:
    faults = Drill(f"{kind}:rank=1,step=5")
    monkeypatch.setattr(os, "kill", lambda pid, what: faults.log.append((str(pid), what)))
    faults.arm(1, 5, None)
    faults.hit("forward")
    assert faults.log == [("said", "forward"), (str(os.getpid()), number)]


def test_without_faults_nothing_has_to_be_armed() -> None:
    assert not Drill("").any
    assert Drill("@later").any
