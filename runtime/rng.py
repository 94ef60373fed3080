"""The states of this process's global random number generators: python, numpy, torch, device."""

import ctypes
import hashlib
import random
import struct
from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

_PYTHON = struct.Struct("<i?d")  # version, has gauss, gauss
_NUMPY = struct.Struct("<iid")  # position, has gauss, gauss
_MT19937_BYTES = 625 * 4  # numpy's mt19937_state: key[624], pos


class RngState(NamedTuple):
    """All generators at one moment; `cpu` is torch's, `device` is None without CUDA.

    Bytes, and the very same object as before while a generator rests: then nothing is packed,
    and who compares two states compares pointers.
    """

    python: bytes
    numpy: bytes
    cpu: bytes
    device: bytes | None = None


def capture() -> RngState:
    """Cheap (5 us): compared in place with the last one, and packed only where it has changed."""
    global _last
    cpu = _held(_last.cpu, torch.default_generator.get_state())
    device = _held(_last.device, torch.cuda.get_rng_state()) if _has_device() else None
    _last = RngState(_python.get(), _numpy.get(), cpu, device)
    return _last


def restore(state: RngState) -> None:
    """Puts every generator back, exactly."""
    random.setstate(_unpack_python(state.python))
    np.random.set_state(_unpack_numpy(state.numpy))
    torch.set_rng_state(_tensor(state.cpu))
    if state.device is not None:
        torch.cuda.set_rng_state(_tensor(state.device))


def to_parts(state: RngState) -> dict[str, bytes]:
    """One part for each generator, so that one that rests is not sent again."""
    parts = {"python": state.python, "numpy": state.numpy, "cpu": state.cpu}
    if state.device is not None:
        parts["device"] = state.device
    return parts


def from_parts(parts: Mapping[str, bytes]) -> RngState:
    """The state that `to_parts` wrote. Raises ValueError for a missing or malformed part."""
    try:
        state = RngState(parts["python"], parts["numpy"], parts["cpu"], parts.get("device"))
        _unpack_python(state.python)
        _unpack_numpy(state.numpy)
    except (KeyError, struct.error, ValueError) as e:
        raise ValueError(f"not the random state of a rank: {e!r}") from e
    return state


def seed_from(*key: object) -> int:
    """A 63-bit seed that is a function of `key` alone, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little") >> 1


def seed_all(seed: int) -> None:
    """Seeds python, numpy and torch (device included, if in use) from one number."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    # not torch.manual_seed: before CUDA is in use it would leave a seed for later
    torch.default_generator.manual_seed(seed)
    if _has_device():
        torch.cuda.manual_seed(seed)


def seed_rank(rank: int) -> None:
    """Before `train`: a script that seeds nothing is reproducible, and differs between ranks."""
    seed_all(seed_from("train", rank))


class Stream:
    """Random numbers of their own for the bodies of `with`; those of the rank do not move."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inside: RngState | None = None
        self._outside: RngState | None = None

    def __enter__(self) -> None:
        self._outside = capture()
        if self._inside is None:
            seed_all(self._seed)
        else:
            restore(self._inside)

    def __exit__(self, *error: object) -> None:
        self._inside = capture()
        assert self._outside is not None
        restore(self._outside)


def _has_device() -> bool:
    return torch.cuda.is_initialized()  # type: ignore[no-any-return,no-untyped-call]


def _held(last: bytes | None, state: torch.Tensor) -> bytes:
    content = state.numpy()
    return last if last is not None and _equal(last, content) else content.tobytes()


def _equal(last: bytes, now: Any) -> bool:
    """Whether a buffer holds `last`; unlike `==` it copies nothing: to allocate some kB costs 10 us
    after a step of torch, which leaves many small pieces to merge."""
    return last.startswith(now) and len(last) == now.nbytes


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _memory(address: int, size: int) -> memoryview:
    """What stands there now, and whatever will later."""
    return memoryview((ctypes.c_char * size).from_address(address))


# ---- python


class _Python:
    """random's generator. getstate makes 625 integers (12 us), so what it said holds while the
    generator's memory is the same; the second of two normals stands elsewhere.
    """

    def __init__(self) -> None:
        self._generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
        words: Any = random.Random.__base__
        at = id(self._generator) + object.__basicsize__
        self._memory = _memory(at, words.__basicsize__ - object.__basicsize__)
        key = array("I", random.getstate()[1][:-1]).tobytes()
        self._in_memory = key in self._memory.tobytes()  # else an interpreter we do not know
        self._seen, self._had_gauss = b"", False
        self._part = b""

    def get(self) -> bytes:
        rests = self._in_memory and _equal(self._seen, self._memory)
        has_gauss = self._generator.gauss_next is not None
        if not rests or has_gauss or self._had_gauss:
            memory = self._memory.tobytes()
            version, internal, gauss = random.getstate()
            words = array("I", internal).tobytes()
            part = _PYTHON.pack(version, gauss is not None, gauss or 0.0) + words
            self._part = self._part if self._part == part else part
            self._seen, self._had_gauss = memory, has_gauss
        return self._part


def _unpack_python(part: bytes) -> tuple[Any, ...]:
    version, has_gauss, gauss = _PYTHON.unpack_from(part)
    words = array("I", part[_PYTHON.size :])
    return version, tuple(words), gauss if has_gauss else None


# ---- numpy


class _Numpy:
    """numpy's legacy generator. get_state costs 60 us, so what it said holds while neither the
    memory of the twister nor that of the object around it has changed; in the latter is the second
    of two normals, which can be used up without a trace in the twister.
    """

    def __init__(self) -> None:
        around: Any = np.random.get_state.__self__  # type: ignore[attr-defined]
        size = type(around).__basicsize__ - object.__basicsize__
        self._around = _memory(id(around) + object.__basicsize__, size)
        self._generator: Any = None
        self._twister = memoryview(b"")
        self._seen = b"", b""
        self._part = b""

    def get(self) -> bytes:
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if generator is not self._generator:
            self._begin(generator)
        twister, around = self._seen
        if not (_equal(twister, self._twister) and _equal(around, self._around)):
            self._seen = self._twister.tobytes(), self._around.tobytes()
            state: Any = np.random.get_state()
            _, key, position, has_gauss, gauss = state
            self._part = _NUMPY.pack(position, has_gauss, gauss) + key.tobytes()
        return self._part

    def _begin(self, generator: Any) -> None:
        if not isinstance(generator, np.random.MT19937):
            raise TypeError(
                "expected numpy's global generator to be the MT19937 it starts with, got "
                f"{type(generator).__name__}; make a np.random.Generator of your own instead"
            )
        self._generator, self._seen = generator, (b"", b"")
        self._twister = _memory(generator.ctypes.state_address, _MT19937_BYTES)


def _unpack_numpy(part: bytes) -> tuple[Any, ...]:
    position, has_gauss, gauss = _NUMPY.unpack_from(part)
    key = np.frombuffer(part[_NUMPY.size :], np.uint32)
    return "MT19937", key, position, has_gauss, gauss


_python, _numpy = _Python(), _Numpy()
_last = RngState(b"", b"", b"")
