"""The short way of copying gives what `copy.deepcopy` gives."""

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmover.runtime import plain

ATOMS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3)
)
VALUES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(lambda x: [x, x]),  # one object at two places
        st.dictionaries(ATOMS, inner, max_size=3),
        st.dictionaries(st.tuples(st.integers()), inner, max_size=2),
        st.dictionaries(st.text(max_size=2), inner, max_size=2).map(OrderedDict),
    ),
    max_leaves=12,
)


def shape(value: Any, seen: dict[int, int]) -> Any:
    """The value with the type of everything in it, and which containers are the same object."""
    if not isinstance(value, list | dict):
        items = [shape(v, seen) for v in value] if isinstance(value, tuple) else repr(value)
        return type(value).__name__, items
    if id(value) in seen:
        return "again", seen[id(value)]
    seen[id(value)] = len(seen)
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    return type(value).__name__, [(shape(k, seen), shape(v, seen)) for k, v in pairs]


def scramble(value: Any) -> None:
    """Changes every list and dict in `value` in place."""
    inside = value.values() if isinstance(value, dict) else value
    if isinstance(value, list | dict | tuple):
        for item in list(inside):
            scramble(item)
    if isinstance(value, list):
        value.append("changed")
    elif isinstance(value, dict):
        value["changed"] = True


@settings(max_examples=200)
@given(VALUES)
def test_a_copy_is_what_the_slow_way_makes_and_outlives_every_change(value: Any) -> None:
    expected = shape(copy.deepcopy(value), {})
    copied = plain.deepcopy(value)
    scramble(value)
    assert shape(copied, {}) == expected


def test_a_value_that_contains_itself_does_so_in_the_copy() -> None:
    value: dict[str, Any] = {"items": []}
    value["items"].append(value)
    copied = plain.deepcopy(value)
    assert copied["items"][0] is copied is not value


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: [t, t], lambda t: {"a": (t, 1)}])
def test_tensors_are_copied_too(wrap: Any) -> None:
    tensor = torch.zeros(2)
    copied = plain.deepcopy(wrap(tensor))
    tensor.fill_(1)
    assert repr(copied) == repr(wrap(torch.zeros(2)))
