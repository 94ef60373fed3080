"""Tagged JSON: values come back with their types; hostile text is refused."""

import contextlib
import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmover.runtime import codec


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 3


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.complex_numbers(allow_nan=False),
    st.sampled_from([Color.RED, Level.LOW, torch.bfloat16, torch.Size([2, 3]), np.float32(0.1)]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=4).map(lambda items: deque(items, maxlen=5)),
        st.dictionaries(st.one_of(st.integers(), st.text(), st.tuples(st.text())), inner),
        st.dictionaries(st.text(), inner).map(OrderedDict),
        st.dictionaries(st.text(), inner).map(lambda d: defaultdict(list, d)),
        st.lists(st.integers(0, 3), max_size=4).map(Counter),
        st.frozensets(st.integers(), max_size=4),
    ),
    max_leaves=12,
)
JSON = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=6), st.floats()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["dict", "tensor", "array", "enum", "deque", "float", "Size", "bytes"]),
            inner,
            max_size=1,
        ),
    ),
    max_leaves=10,
)


def same(a: Any, b: Any) -> bool:
    """Equal, with equal types all the way down."""
    if type(a) is not type(b) or a != b:
        return False
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return all(same(k, m) and same(v, n) for (k, v), (m, n) in pairs)
    if isinstance(a, list | tuple | deque):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    return True


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_a_value_comes_back_with_all_its_types(value: object) -> None:
    assert same(codec.decode(codec.encode(value)), value)


def test_numbers_come_back_bit_for_bit() -> None:
    for x in (math.nan, math.inf, -math.inf, -0.0, 0.1, 5e-324):
        back = codec.decode(codec.encode([x, complex(x, 1)]))
        assert np.float64(back[0]).tobytes() == np.float64(x).tobytes()
        assert np.complex128(back[1]).tobytes() == np.complex128(complex(x, 1)).tobytes()


def test_arrays_and_tensors_come_back_with_dtype_and_shape() -> None:
    for array in (np.arange(6, dtype=">i2").reshape(2, 3), np.zeros((0, 3)), np.array(True)):
        back = codec.decode(codec.encode(array))
        assert (back.dtype, back.shape, back.tobytes()) == (
            array.dtype,
            array.shape,
            array.tobytes(),
        )
        assert back.flags.writeable
    for tensor in (torch.arange(6).view(2, 3).t(), torch.tensor(1.5).bfloat16(), torch.empty(0, 2)):
        back = codec.decode(codec.encode(tensor))
        assert back.dtype == tensor.dtype
        assert torch.equal(back, tensor)


def test_taken_out_tensors_are_replaced_by_what_the_caller_makes() -> None:
    tensors: list[torch.Tensor] = []
    data = codec.encode({"a": torch.ones(2), "b": (torch.zeros(3),)}, tensors=tensors)
    back = codec.decode(data, lambda spec: tensors[spec.index])
    assert back["a"] is tensors[0]
    assert back["b"][0] is tensors[1]
    with pytest.raises(ValueError, match="beside the text"):
        codec.decode(data)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, lambda: 0]}, r"x\['a'\]\[1\]"),
        ({3: object()}, r"x\[3\]"),
        (defaultdict(lambda: 0), "x is a defaultdict"),
        (np.array([object()]), "x is a numpy.ndarray"),
        (torch.eye(2).to_sparse(), "x is a tensor of layout"),
        (enum.Enum("Made", ["UP"]).UP, "cannot be found by its name"),  # type: ignore[attr-defined]
    ],
)
def test_what_cannot_move_is_refused_with_the_path_to_it(value: object, path: str) -> None:
    with pytest.raises(codec.Unmovable, match=path):
        codec.encode(value, "x")


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(codec.Unmovable, match="contains itself"):
        codec.encode(loop)


@settings(max_examples=80, deadline=None)
@given(st.one_of(JSON.map(lambda v: json.dumps(v).encode()), st.binary(max_size=40)))
def test_hostile_text_is_a_value_or_a_value_error(data: bytes) -> None:
    for read in (codec.decode, codec.canonical):
        with contextlib.suppress(ValueError):
            read(data)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[" * 80 + "]" * 80,
        '{"enum":["antigravity","x","y"]}',
        '{"enum":["os","path","sep"]}',
        '{"array":["O",[1],"AAAAAAAAAAA="]}',
        '{"array":["<f8",[1000000000000],""]}',
        '{"tensor":["AAAA","torch.float32",[9]]}',
        '{"dict":[[[],1]]}',
        '{"deque":[1,2]}',
        '{"tuple":1,"set":2}',
        '{"eval":"1"}',
        "NaN",
        "",
    ],
)
def test_known_attacks_are_value_errors(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        codec.decode(text.encode())


def test_the_canonical_form_ignores_the_order_of_plain_dicts_alone() -> None:
    one, two = torch.ones(1), torch.zeros(1)

    def canonical(value: object) -> tuple[bytes, list[bytes]]:
        tensors: list[torch.Tensor] = []
        text, order = codec.canonical(codec.encode(value, tensors=tensors))
        return text, [tensors[i].numpy().tobytes() for i in order]

    assert canonical({"a": one, "b": [{1: two}]}) == canonical({"b": [{1: two}], "a": one})
    assert canonical({"a": one, "b": two}) != canonical({"a": two, "b": one})
    assert canonical(OrderedDict(a=1, b=2)) != canonical(OrderedDict(b=2, a=1))
    assert canonical([1, 2]) != canonical([2, 1])
