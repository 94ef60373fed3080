"""What a rank's collectives did comes again without the others, and leaves no hook behind."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.unit.linked_ranks import WITHIN_S, Rank, engine_of, world
from torch import Tensor

from trainmover.runtime import recorder as recording
from trainmover.runtime.admission import Admission, Issued, Mode
from trainmover.runtime.engine import LinkEngine, Wiring
from trainmover.runtime.exchange import Call
from trainmover.runtime.fence import Fence
from trainmover.runtime.groups import LinkGroup
from trainmover.runtime.recorder import Recorder
from trainmover.runtime.replayer import Replayer
from trainmover.runtime.tape import MAX_FLOAT_BYTES, Key, Tape, TapeMismatch
from trainmover.runtime.wire import Op

KEY = Key(layout="dp=1", script="s", role_class="all")
LARGE = MAX_FLOAT_BYTES // 4 + 1


class Here:
    """A group of which this is the only rank: its collectives do what the test says."""

    def __init__(self, mode: Mode, *hooks: Recorder | Replayer) -> None:
        fence = Fence()
        fence.open(1)
        self.admission = Admission(mode=mode)
        wiring = Wiring(None, fence, self.admission, lambda issued: None, lambda *facts: None)
        self.engine = LinkEngine(wiring, "world", (0,), 0)
        for hook in hooks:
            hook.attach(self.engine)

    def receive(self, output: Tensor, value: float, *, op: Op = Op.SEND) -> Tensor:
        """`output` becomes `value` where it is real and -1 where it is made up."""

        def run(call: Call, ring: object) -> None:
            output.fill_(value)

        issued = Issued("world", op.name.lower(), str(output.dtype), tuple(output.shape))
        made_up: Callable[[], object] = lambda: output.fill_(-1)  # noqa: E731
        self.engine.issue(issued, op, [output], run, made_up, True).wait()  # type: ignore[arg-type]
        return output


def recorded(*steps: list[Tensor], crosses: bool = True) -> Tape:
    """In set-up and in each shadow step these are received, with values that count from 1."""
    recorder = Recorder(lambda ranks: crosses)
    here = Here(Mode.SETUP, recorder)
    value = 0
    for number, outputs in enumerate(steps):
        if number:
            recorder.begin_step()
        for output in outputs:
            value += 1
            here.receive(output, value)
    recorder.detach()
    return Tape.from_bytes(recorder.tape(KEY).to_bytes(), KEY)


def one() -> Tensor:
    return torch.zeros(1, dtype=torch.int64)


# ---- the same comes again


def test_a_replay_gives_the_outputs_that_were_recorded() -> None:
    tape = recorded([one()], [one(), torch.zeros(2)], [one(), torch.zeros(2)])
    replayer = Replayer(tape)
    there = Here(Mode.ECHO, replayer)
    assert there.receive(one(), 0).tolist() == [1]
    for first in (2, 4):
        replayer.begin_step()
        assert there.receive(one(), 0).tolist() == [first]
        assert there.receive(torch.zeros(2), 0).tolist() == [first + 1] * 2


def test_outputs_are_recorded_as_they_were_when_the_collective_ended() -> None:
    output = one()
    recorder = Recorder(lambda ranks: True)
    Here(Mode.SETUP, recorder).receive(output, 5)
    output.fill_(6)
    (entry,) = recorder.tape(KEY).groups[0]
    assert entry.values[0].tolist() == [5]


def test_outputs_that_do_not_lie_contiguous_come_again() -> None:
    tape = recorded([torch.zeros(2, 3).t()])
    output = torch.zeros(2, 3).t()
    assert Here(Mode.ECHO, Replayer(tape)).receive(output, 0).eq(1).all()


def test_large_floats_are_made_up_and_large_integers_are_not() -> None:
    outputs = torch.zeros(LARGE), torch.zeros(LARGE, dtype=torch.int64)
    tape = recorded(list(outputs))
    there = Here(Mode.ECHO, Replayer(tape))
    assert there.receive(outputs[0], 0).eq(-1).all()
    assert there.receive(outputs[1], 0).eq(2).all()
    assert tape.num_bytes == outputs[1].nbytes


def test_of_groups_inside_the_replaced_unit_no_values_are_kept() -> None:
    tape = recorded([one()], crosses=False)
    assert [str(e) for e in tape.groups[0]] == ["send of torch.int64 [1]"]
    assert Here(Mode.ECHO, Replayer(tape)).receive(one(), 0).tolist() == [-1]


def test_a_full_tape_keeps_what_is_done_and_makes_the_rest_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recording, "MAX_BYTES", 16)
    tape = recorded([one(), one(), one(), torch.zeros((), dtype=torch.bool)])
    assert not tape.whole
    assert [len(entry.values) for entry in tape.groups[0]] == [1, 1, 0, 0]
    there = Here(Mode.ECHO, Replayer(tape))
    assert [there.receive(one(), 0).item() for _ in range(3)] == [1, 2, -1]


def test_what_the_runtime_does_for_itself_is_not_recorded() -> None:
    recorder = Recorder(lambda ranks: True)
    here = Here(Mode.SETUP, recorder)
    with recorder.paused():
        here.receive(one(), 1)
    here.receive(one(), 2)
    assert [e.values[0].item() for e in recorder.tape(KEY).groups[0]] == [2]


# ---- another number of steps than recorded


def test_behind_the_last_step_of_a_tape_that_step_comes_again() -> None:
    tape = recorded([], [one()], [one()])
    replayer = Replayer(tape)
    there = Here(Mode.ECHO, replayer)
    seen = []
    for _ in range(4):
        replayer.begin_step()
        seen.append(there.receive(one(), 0).item())
    assert seen == [1, 2, 2, 2]


def test_a_step_that_goes_on_behind_the_vote_makes_up_what_no_tape_has() -> None:
    tape = recorded([], [one()], [one()])
    replayer = Replayer(tape)
    there = Here(Mode.ECHO, replayer)
    replayer.begin_step()
    there.receive(one(), 0)
    replayer.begin_step(tail=True)
    assert there.receive(one(), 0).item() == 2
    assert there.receive(one(), 0).item() == -1


# ---- what differs


@pytest.mark.parametrize(
    ("output", "op", "got"),
    [
        (torch.zeros(2, dtype=torch.int64), Op.SEND, "send of torch.int64 [2]"),
        (torch.zeros(1), Op.SEND, "send of torch.float32 [1]"),
        (one(), Op.BROADCAST, "broadcast of torch.int64 [1]"),
    ],
    ids=["shape", "dtype", "op"],
)
def test_the_first_collective_that_differs_is_named(output: Tensor, op: Op, got: str) -> None:
    replayer = Replayer(recorded([one()], [one(), one()]))
    there = Here(Mode.ECHO, replayer)
    there.receive(one(), 0)
    replayer.begin_step()
    there.receive(one(), 0)
    with pytest.raises(TapeMismatch) as error:
        there.receive(output, 0, op=op)
    assert str(error.value) == (
        f"group 0 (world), collective 2 of 3 in shadow step 0: expected send of torch.int64 [1], "
        f"got {got}"
    )
    assert replayer.mismatch is error.value


def test_a_collective_too_many_differs() -> None:
    replayer = Replayer(recorded([one()], [one()]))
    there = Here(Mode.ECHO, replayer)
    there.receive(one(), 0)
    with pytest.raises(
        TapeMismatch, match=r"expected the end of set-up, got send of .*int64 \[1\]"
    ):
        there.receive(one(), 0)


def test_a_collective_too_few_differs_when_the_next_step_begins() -> None:
    replayer = Replayer(recorded([], [one(), one()], [one(), one()]))
    there = Here(Mode.ECHO, replayer)
    replayer.begin_step()
    there.receive(one(), 0)
    with pytest.raises(TapeMismatch, match=r"collective 1 of 2 .* got the end of shadow step 0"):
        replayer.begin_step()


def test_a_group_that_was_not_recorded_differs_at_its_first_collective() -> None:
    replayer = Replayer(recorded([one()]))
    Here(Mode.ECHO, replayer).receive(one(), 0)
    with pytest.raises(TapeMismatch, match=r"group 1 .* collective 0 of 0 in set-up"):
        Here(Mode.ECHO, replayer).receive(one(), 0)


def test_a_group_that_was_not_recorded_differs_in_a_step_too() -> None:
    replayer = Replayer(recorded([], [one()]))
    Here(Mode.ECHO, replayer)
    other = Here(Mode.ECHO, replayer)
    replayer.begin_step()
    with pytest.raises(TapeMismatch, match=r"group 1 .* collective 0 of 0 in shadow step 0"):
        other.receive(one(), 0)


def test_a_recorded_group_that_is_not_made_differs() -> None:
    recorder = Recorder(lambda ranks: True)
    for _ in range(2):
        Here(Mode.SETUP, recorder).receive(one(), 1)
    replayer = Replayer(recorder.tape(KEY))
    Here(Mode.ECHO, replayer).receive(one(), 0)
    with pytest.raises(TapeMismatch, match=r"group 1 \(not made\), collective 0 of 1 in set-up"):
        replayer.begin_step()


def test_a_group_of_another_size_differs() -> None:
    there = Here(Mode.ECHO, Replayer(replace(recorded([one()]), sizes=(3,))))
    with pytest.raises(TapeMismatch, match=r"expected a group of 3 ranks, got send of .* of 1$"):
        there.receive(one(), 0)


def test_an_output_of_another_shape_than_recorded_differs() -> None:
    tape = recorded([one()])
    engine = Here(Mode.ECHO, Replayer(tape)).engine
    issued = Issued("world", "send", "torch.int64", (1,))
    outputs = [torch.zeros(2, dtype=torch.int64)]
    with pytest.raises(TapeMismatch, match=r"with output 0 of \[1\], got outputs \[\(2,\)\]"):
        engine.issue(issued, Op.SEND, outputs, lambda call, ring: None, lambda: None, True)


# ---- nothing stays


@pytest.mark.parametrize(
    "hook", [Recorder(lambda ranks: True), Replayer(Tape(KEY, ((),), (1,), ()))]
)
def test_without_the_hook_a_group_is_as_if_it_never_had_one(hook: Recorder | Replayer) -> None:
    here = Here(Mode.SETUP, hook)
    assert "issue" in vars(here.engine)
    hook.detach()
    assert here.engine.issue.__func__ is LinkEngine.issue  # type: ignore[attr-defined]
    assert vars(here.engine).keys() == vars(Here(Mode.SETUP).engine).keys()


def test_a_collective_that_was_recorded_once_costs_no_call_more() -> None:
    never, once = Here(Mode.SETUP), Here(Mode.SETUP)
    recorder = Recorder(lambda ranks: True)
    recorder.attach(once.engine)
    once.receive(one(), 1)
    recorder.detach()
    never.receive(one(), 1)
    assert calls_of(once) == calls_of(never)


def calls_of(here: Here) -> int:
    """How many functions, Python's and C's, a collective runs in this thread."""
    output, calls = one(), 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        here.receive(output, 1)
    finally:
        sys.setprofile(None)
    return calls


# ---- real groups


def training(group: LinkGroup, rank: int) -> None:
    """What a data-parallel rank does, with outputs whose shape does not depend on their number."""
    group.broadcast([torch.arange(5) + rank], root()).wait()
    group.allreduce([torch.full((3,), rank, dtype=torch.int32)]).wait()
    group.allreduce([torch.ones(LARGE)]).wait()
    group.barrier().wait()


def root() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return options


def taped_by_rank_0(folder: Path, size: int) -> Tape:
    recorder = Recorder(lambda ranks: True)

    def perform(rank: Rank) -> None:
        engine = engine_of(rank, size)
        if rank.rank == 0:
            recorder.attach(engine)
        training(LinkGroup(engine), rank.rank)
        engine.settle()
        engine.close(WITHIN_S)

    with world(folder, size) as ranks:
        ranks.all(perform)
    recorder.detach()
    return recorder.tape(KEY)


def test_a_tape_does_not_grow_with_the_number_of_ranks(tmp_path: Path) -> None:
    (two := tmp_path / "2").mkdir()
    (four := tmp_path / "4").mkdir()
    small, large = taped_by_rank_0(two, 2), taped_by_rank_0(four, 4)
    assert len(small.to_bytes()) == len(large.to_bytes())
    assert [list(e.values) for e in small.groups[0]] == [[0], [0], [], []]
    assert small.groups[0][1].values[0].tolist() == [0 + 1] * 3
    assert large.groups[0][1].values[0].tolist() == [0 + 1 + 2 + 3] * 3
