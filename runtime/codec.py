"""Values of tracked state as tagged JSON: all come back with their types, nothing is unpickled.

JSON scalars and lists stand for themselves; every other value is an object with one key, its tag.
Tensors are either written inline or taken out, to travel as raw bytes beside the text.
"""

import base64
import binascii
import enum
import json
import math
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainmover.runtime import raw

MAX_DEPTH = 64
_DTYPES = {str(d): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_FACTORIES = {t.__name__: t for t in (bool, bytes, dict, float, int, list, set, str, tuple)}
_NUMPY = re.compile(r"[<>|=]?[biufcSUMm]\d+(\[\w+\])?")  # no objects, no records
_ATOMS = frozenset({type(None), bool, int, str})
_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class Unmovable(TypeError):
    """A value that cannot travel with a rank; `path` says where it was found."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(
            f"{path} is {what}, which cannot move with a rank; expected numbers, strings, bytes, "
            "lists, tuples, dicts, sets, deques, enums, numpy values and dense tensors"
        )
        self.path = path


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that travels beside the text as bytes number `index`; `shape` is of its shard."""

    index: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    placements: str | None


def encode(value: object, path: str = "value", tensors: list[torch.Tensor] | None = None) -> bytes:
    """`value` as ASCII JSON; tensors are appended to `tensors` (local shards, live) or put inline.

    Raises Unmovable with the path, which begins with `path`, to what has no encoding.
    """
    tree = _Encoder(tensors).tree(value, path, 0)
    return _json(tree).encode()


def decode(data: bytes, tensor: Callable[[TensorSpec], object] | None = None) -> Any:
    """The value of `encode`; `tensor` makes the stand-in of each tensor that was taken out.

    Raises ValueError for anything that `encode` does not write; imports and runs nothing.
    """
    tree = _parse(data)
    try:
        return _Decoder(tensor).value(tree, 0)
    except (TypeError, LookupError, OverflowError, RuntimeError, struct.error) as e:
        raise ValueError(f"not an encoded value: {e}") from e


def canonical(data: bytes) -> tuple[bytes, list[int]]:
    """Encoded `data` with the entries of plain dicts sorted, and its tensors in that order.

    Equal for two values that differ only in the insertion order of plain dicts.
    """
    order: list[int] = []
    tree = _sorted(_parse(data), order, 0)
    return _json(tree).encode(), order


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"not an encoded value: {e or 'nested too deeply'}") from e


def _refuse_constant(name: str) -> None:
    raise ValueError(f"a bare {name}")


def _sorted(tree: Any, order: list[int], depth: int) -> Any:
    if depth > 4 * MAX_DEPTH:
        raise ValueError("not an encoded value: nested too deeply")
    if isinstance(tree, list):
        return [_sorted(item, order, depth + 1) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if isinstance(pairs := tree.get("dict"), list):
        pairs = sorted(
            pairs, key=lambda pair: json.dumps(pair[:1]) if isinstance(pair, list) else ""
        )
        return {"dict": _sorted(pairs, order, depth + 1)}
    if isinstance(spec := tree.get("tensor"), list) and spec and type(spec[0]) is int:
        order.append(spec[0])
        return {"tensor": [len(order) - 1, *spec[1:]]}
    return {tag: _sorted(body, order, depth + 1) for tag, body in tree.items()}


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}


class _Encoder:
    def __init__(self, tensors: list[torch.Tensor] | None) -> None:
        self._tensors = tensors

    def tree(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise Unmovable(path, f"nested more than {MAX_DEPTH} deep (or contains itself)")
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is float:
            return _float(value)
        if kind is list:
            return self._items(value, path, depth)
        if kind in (tuple, torch.Size, set, frozenset, deque):
            return self._sequence(kind, value, path, depth)
        if kind in (dict, OrderedDict, Counter, defaultdict):
            return self._mapping(kind, value, path, depth)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        return _leaf(value, path)

    def _items(self, values: Iterable[object], path: str, depth: int) -> list[Any]:
        return [self.tree(v, f"{path}[{i}]", depth + 1) for i, v in enumerate(values)]

    def _sequence(self, kind: type, value: Any, path: str, depth: int) -> Any:
        items = self._items(value, path, depth)
        if kind in (set, frozenset):
            items.sort(key=json.dumps)  # a set has no order that two processes share
        return {kind.__name__: [items, value.maxlen] if kind is deque else items}

    def _mapping(self, kind: type, value: Any, path: str, depth: int) -> Any:
        keys = self._items(value, f"{path}.keys()", depth)
        values = [self.tree(v, f"{path}[{k!r}]", depth + 1) for k, v in value.items()]
        pairs = [list(pair) for pair in zip(keys, values, strict=True)]
        if kind is not defaultdict:
            return {kind.__name__: pairs}
        factory = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and _FACTORIES.get(name) is not factory:
            raise Unmovable(path, f"a defaultdict of {factory!r}")
        return {"defaultdict": [name, pairs]}

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        local = raw.local(value)
        if not raw.is_dense(local):
            raise Unmovable(path, f"a tensor of layout {local.layout} on {local.device}")
        dtype, shape = str(local.dtype), list(local.shape)
        if self._tensors is None:
            return {"tensor": [_b64(raw.to_bytes(local)), dtype, shape]}
        placements = getattr(value, "placements", None)  # of a DTensor
        self._tensors.append(local)
        index = len(self._tensors) - 1
        return {"tensor": [index, dtype, shape, local.device.type, placements and str(placements)]}


def _leaf(value: Any, path: str) -> Any:
    kind = type(value)
    if kind in (bytes, bytearray):
        return {kind.__name__: _b64(value)}
    if kind is complex:
        return {"complex": [_float(value.real), _float(value.imag)]}
    if kind is torch.dtype:
        return {"dtype": str(value)}
    if (isinstance(value, np.generic) or kind is np.ndarray) and _NUMPY.fullmatch(value.dtype.str):
        return {"array": [value.dtype.str, _shape(value), _b64(value.tobytes())]}
    if isinstance(value, enum.Enum):
        return _enum(value, path)
    raise Unmovable(path, f"a {kind.__module__}.{kind.__qualname__}")


def _enum(value: enum.Enum, path: str) -> Any:
    kind = type(value)
    place = [kind.__module__, kind.__qualname__, value.name]
    try:
        if _find_enum(*place) is value:
            return {"enum": place}
    except (ValueError, TypeError, KeyError):
        pass
    raise Unmovable(path, f"{value!r}, an enum member that cannot be found by its name")


def _find_enum(module: str, qualname: str, name: str) -> object:
    """Looks only at what is imported and at plain attributes, so no code of a module runs."""
    if module not in sys.modules:
        raise ValueError(f"the enum {qualname} needs module {module}, which is not imported")
    scope: Any = sys.modules[module]
    for part in qualname.split("."):
        scope = vars(scope)[part]
    if not isinstance(scope, enum.EnumMeta):
        raise ValueError(f"{module}.{qualname} is not an enum")
    return scope.__members__[name]


class _Decoder:
    def __init__(self, tensor: Callable[[TensorSpec], object] | None) -> None:
        self._make_tensor = tensor

    def value(self, tree: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError(f"not an encoded value: nested more than {MAX_DEPTH} deep")
        if isinstance(tree, list):
            return [self.value(item, depth + 1) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if len(tree) != 1:
            raise ValueError(f"expected an object with one tag, got the keys {sorted(tree)[:4]}")
        ((tag, body),) = tree.items()
        match tag:
            case "dict" | "OrderedDict" | "Counter":
                kind = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}[tag]
                return kind(self._pairs(body, depth))
            case "defaultdict":
                factory = None if body[0] is None else _FACTORIES[body[0]]
                return defaultdict(factory, self._pairs(body[1], depth))
            case "deque":
                return deque(self._list(body[0], depth), body[1])
            case "tuple" | "Size" | "set" | "frozenset":
                kinds = {"tuple": tuple, "Size": torch.Size, "set": set, "frozenset": frozenset}
                return kinds[tag](self._list(body, depth))
            case "tensor":
                return self._tensor(body)
        return _decode_leaf(tag, body)

    def _list(self, body: Any, depth: int) -> list[Any]:
        if not isinstance(body, list):
            raise ValueError(f"expected a list, got {type(body).__name__}")
        return [self.value(item, depth + 1) for item in body]

    def _pairs(self, body: Any, depth: int) -> dict[Any, Any]:
        return {self.value(k, depth + 1): self.value(v, depth + 1) for k, v in body}

    def _tensor(self, body: Any) -> object:
        first, dtype, shape, *where = body
        shape = tuple(_size(n) for n in shape)
        if isinstance(first, str):
            return raw.from_bytes(_unb64(first), _DTYPES[dtype], shape)
        if self._make_tensor is None:
            raise ValueError("a tensor that travels beside the text is not expected here")
        device, placements = where
        return self._make_tensor(
            TensorSpec(_size(first), _DTYPES[dtype], shape, str(device), placements)
        )


def _size(n: Any) -> int:
    if type(n) is not int or n < 0:
        raise ValueError(f"expected a size, got {n!r}")
    return n


def _unb64(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as e:
        raise ValueError(f"not base64: {e}") from e


def _decode_leaf(tag: str, body: Any) -> Any:
    match tag:
        case "float":
            return struct.unpack(">d", bytes.fromhex(body))[0]
        case "bytes":
            return _unb64(body)
        case "bytearray":
            return bytearray(_unb64(body))
        case "complex":
            real, imag = (_Decoder(None).value(part, MAX_DEPTH - 1) for part in body)
            return complex(real, imag)
        case "dtype":
            return _DTYPES[body]
        case "array":
            return _array(*body)
        case "enum":
            return _find_enum(*body)
    raise ValueError(f"unknown tag {tag!r}; the sender may run a newer version")


def _array(dtype: str, shape: list[int] | None, data: str) -> Any:
    if not _NUMPY.fullmatch(dtype):
        raise ValueError(f"expected a plain numpy dtype, got {dtype!r}")
    values = np.frombuffer(_unb64(data), np.dtype(dtype))
    if shape is None:
        return values.reshape(())[()]
    return values.reshape(tuple(_size(n) for n in shape)).copy()  # frombuffer's is read-only


def _shape(value: Any) -> list[int] | None:
    """None for a scalar, which is another type than an array without dimensions."""
    return list(value.shape) if isinstance(value, np.ndarray) else None


def dtype(name: str) -> torch.dtype:
    """torch.float32 for "torch.float32". Raises ValueError for what is none."""
    if name not in _DTYPES:
        raise ValueError(f"expected the name of a torch dtype, got {name!r}")
    return _DTYPES[name]
