"""Extras survive the way to a buddy, and nothing else does."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmover.runtime.extras import Shelf, pack, unpack

PARTS = st.dictionaries(st.text(max_size=8), st.binary(max_size=16), max_size=5)


@settings(max_examples=40)
@given(PARTS)
def test_what_is_packed_is_unpacked(parts: dict[str, bytes]) -> None:
    assert unpack(pack(parts)) == parts
    assert unpack(pack(parts, b"prefix"), at=6) == parts


@settings(max_examples=40)
@given(PARTS, st.data())
def test_bytes_that_pack_does_not_make_are_refused(
    parts: dict[str, bytes], data: st.DataObject
) -> None:
    packed = bytearray(pack(parts))
    at = data.draw(st.integers(0, len(packed)))
    hostile = bytes(packed[:at]) + data.draw(st.binary(max_size=8))
    hostile += bytes(packed[data.draw(st.integers(at, len(packed))) :])
    try:
        found = unpack(hostile)
    except ValueError:
        return
    assert pack(found) == hostile


@pytest.mark.parametrize(
    ("hostile", "reason"),
    [
        (b"", "malformed"),
        (b"\xff\xff\xff\xff", "malformed"),
        (pack({"vars": b"12345"})[:-1], "in the middle of a part"),
        (pack({"vars": b"12345"}) + b"6", "1 bytes too many"),
        (b"\0\0\0\1\0\1\0\0\0\0\xff", "malformed"),
        (b"\0\0\0\2" + pack({"a": b"1"})[4:] * 2, "twice"),
    ],
)
def test_a_refusal_says_what_is_wrong(hostile: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        unpack(hostile)


@pytest.fixture
def shelf() -> Shelf:
    made = Shelf()
    made.put(1, 4, {"rng": b"4", "vars": b"v"}, full=True)
    return made


def test_a_changed_part_goes_over_the_version_before(shelf: Shelf) -> None:
    shelf.put(1, 5, {"rng": b"5"}, full=False)
    assert shelf.get(1, 5) == {"rng": b"5", "vars": b"v"}
    assert shelf.get(1, 4) == {"rng": b"4", "vars": b"v"}


def test_late_parts_go_over_the_same_version_and_not_over_a_newer_one(shelf: Shelf) -> None:
    shelf.put(1, 6, {"rng": b"6", "vars": b"w"}, full=False)
    shelf.put(1, 5, {"rng": b"5"}, full=False)
    shelf.put(1, 5, {"rng": b"late"}, full=False)
    assert shelf.get(1, 5) == {"rng": b"late", "vars": b"v"}
    assert shelf.get(1, 6) == {"rng": b"6", "vars": b"w"}


def test_full_extras_keep_nothing_of_the_version_before(shelf: Shelf) -> None:
    shelf.put(1, 5, {"rng": b"5"}, full=True)
    assert shelf.get(1, 5) == {"rng": b"5"}


@pytest.mark.parametrize(("rank", "version"), [(2, 5), (1, 3)])
def test_changed_parts_without_full_ones_before_are_refused(
    shelf: Shelf, rank: int, version: int
) -> None:
    with pytest.raises(ValueError, match=f"changed extras {version} of rank {rank} came before"):
        shelf.put(rank, version, {"rng": b"5"}, full=False)
    assert shelf.get(rank, version) is None


def test_what_is_not_kept_is_pruned_of_every_rank(shelf: Shelf) -> None:
    shelf.put(1, 5, {}, full=False)
    shelf.put(2, 5, {"rng": b"x"}, full=True)
    shelf.prune({1: (5,)})
    assert shelf.get(1, 4) is None
    assert shelf.get(1, 5) == {"rng": b"4", "vars": b"v"}
    assert shelf.get(2, 5) is None


def test_a_cleared_shelf_keeps_nothing(shelf: Shelf) -> None:
    shelf.clear()
    assert shelf.get(1, 4) is None
