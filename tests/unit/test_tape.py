"""A tape travels as bytes, comes back equal, and is refused where it does not belong."""

from dataclasses import replace

import pytest
import safetensors.torch
import torch

from trainmover.runtime.tape import (
    MAX_FLOAT_BYTES,
    Entry,
    Key,
    Tape,
    TapeUnusable,
    crosses,
    is_kept,
)

KEY = Key(layout="pp=2", script="abc", role_class="first")


def tape() -> Tape:
    values = {
        0: torch.tensor([1, 2]),
        2: torch.tensor([True]),
        3: torch.tensor(1.5, dtype=torch.bfloat16),
        4: torch.empty(0, 3),
        5: torch.tensor([7], dtype=torch.uint8),
    }
    world = (Entry("all_gather", "torch.int64", (2,), values), Entry("barrier", "", ()))
    return Tape(KEY, (world, (Entry("send", "torch.float32", (4, 4)),)), (4, 2), ((1, 0), (2, 1)))


def test_a_tape_comes_back_from_its_bytes_as_it_was() -> None:
    back = Tape.from_bytes(tape().to_bytes(), KEY)
    assert (back.key, back.sizes) == (KEY, (4, 2))
    assert (back.starts, back.whole) == (((1, 0), (2, 1)), True)
    assert [[str(e) for e in group] for group in back.groups] == [
        ["all_gather of torch.int64 [2]", "barrier"],
        ["send of torch.float32 [4, 4]"],
    ]
    values, expected = back.groups[0][0].values, tape().groups[0][0].values
    assert values.keys() == expected.keys()
    for place, value in expected.items():
        assert values[place].dtype == value.dtype
        assert torch.equal(values[place], value)
    assert back.num_bytes == 16 + 1 + 2 + 0 + 1


def test_equal_tapes_have_equal_bytes() -> None:
    assert tape().to_bytes() == tape().to_bytes()


@pytest.mark.parametrize("what", ["layout", "script", "role_class"])
def test_a_tape_of_another_key_is_refused_by_what_differs(what: str) -> None:
    other = replace(KEY, **{what: "other"})
    named = what.replace("_", " ")
    with pytest.raises(TapeUnusable, match=f"expected a tape of {named} other, got"):
        Tape.from_bytes(tape().to_bytes(), other)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        b"\xff" * 100,
        tape().to_bytes()[:-1],
        safetensors.torch.save({"0.0.0": torch.ones(1)}),
        safetensors.torch.save({"0.0.0": torch.ones(1)}, {"tape": "{}"}),
        safetensors.torch.save({}, {"tape": "[]"}),
    ],
    ids=["empty", "short", "noise", "cut", "foreign", "no-entries", "no-table"],
)
def test_bytes_that_are_no_tape_are_refused(data: bytes) -> None:
    with pytest.raises(TapeUnusable, match="expected a tape"):
        Tape.from_bytes(data, KEY)


def test_what_is_small_or_of_integers_is_kept() -> None:
    fits = MAX_FLOAT_BYTES // 4
    assert is_kept(torch.empty(fits))
    assert not is_kept(torch.empty(fits + 1))
    assert is_kept(torch.empty(fits + 1, dtype=torch.int32))
    assert is_kept(torch.empty(MAX_FLOAT_BYTES + 1, dtype=torch.uint8))
    assert not is_kept(torch.empty(1, dtype=torch.complex64))
    assert not is_kept(torch.empty(1, dtype=torch.uint32))
    assert not is_kept(torch.empty(1, dtype=torch.float8_e5m2))
    assert not is_kept(torch.ones(1).to_sparse())


def test_a_group_crosses_machines_when_its_ranks_are_on_several() -> None:
    placement = ("m0", "m0", "m1", "m1")
    assert not crosses((0, 1), placement, "machine")
    assert crosses((1, 2), placement, "machine")
    assert crosses((0, 1), placement, "worker")
