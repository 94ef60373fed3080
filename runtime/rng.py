"""The states of this process's global random number generators: python, numpy, torch, device."""

import ctypes
import hashlib
import random
import struct
from array import array
from collections.abc import Callable, Mapping
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
    """Cheap: generators are compared in memory with what was seen last, and asked only where that
    has changed. While all of them rest it is the same object again.
    """
    global _last
    python, numpy, cpu = _python.get(), _numpy.get(), _torch.get()
    device = _device(_last.device) if _in_use() else None
    last = _last
    if not (
        python is last.python and numpy is last.numpy and cpu is last.cpu and device is last.device
    ):
        _last = RngState(python, numpy, cpu, device)
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
    if _in_use():
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


_in_use: Callable[[], bool] = torch.cuda.is_initialized


def _device(last: bytes | None) -> bytes:
    state = torch.cuda.get_rng_state().numpy().tobytes()
    return last if last is not None and last == state else state


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _memory(address: int, size: int) -> memoryview:
    """What stands there now, and whatever will later. `seen.startswith(memory)` compares it with
    as many bytes and copies nothing: to allocate some kB costs 10 us after a step of torch, which
    leaves many small pieces to merge.
    """
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
        has_gauss = self._generator.gauss_next is not None
        if has_gauss or self._had_gauss or not self._seen.startswith(self._memory):
            self._seen = self._memory.tobytes() if self._in_memory else b""
            self._had_gauss = has_gauss
            version, internal, gauss = random.getstate()
            words = array("I", internal).tobytes()
            part = _PYTHON.pack(version, gauss is not None, gauss or 0.0) + words
            self._part = self._part if self._part == part else part
        return self._part


def _unpack_python(part: bytes) -> tuple[Any, ...]:
    version, has_gauss, gauss = _PYTHON.unpack_from(part)
    words = array("I", part[_PYTHON.size :])
    return version, tuple(words), gauss if has_gauss else None


# ---- numpy


class _Numpy:
    """numpy's legacy generator. get_state costs 60 us, so what it said holds while neither the
    memory of the twister nor that of the object around it has changed; in the latter are the second
    of two normals, which can be used up without a trace in the twister, and which twister it is.
    """

    def __init__(self) -> None:
        around: Any = np.random.get_state.__self__  # type: ignore[attr-defined]
        size = type(around).__basicsize__ - object.__basicsize__
        self._around = _memory(id(around) + object.__basicsize__, size)
        self._generator: Any = None
        self._twister = memoryview(b"")
        self._seen_twister = self._seen_around = b""
        self._part = b""

    def get(self) -> bytes:
        same = self._seen_around.startswith(self._around)
        if not (same and self._seen_twister.startswith(self._twister)):
            self._read()
        return self._part

    def _read(self) -> None:
        generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if not isinstance(generator, np.random.MT19937):
            raise TypeError(
                "expected numpy's global generator to be the MT19937 it starts with, got "
                f"{type(generator).__name__}; make a np.random.Generator of your own instead"
            )
        if generator is not self._generator:
            self._generator = generator  # held, so that no other one gets its memory
            self._twister = _memory(generator.ctypes.state_address, _MT19937_BYTES)
        self._seen_twister, self._seen_around = self._twister.tobytes(), self._around.tobytes()
        state: Any = np.random.get_state()
        _, key, position, has_gauss, gauss = state
        self._part = _NUMPY.pack(position, has_gauss, gauss) + key.tobytes()


def _unpack_numpy(part: bytes) -> tuple[Any, ...]:
    position, has_gauss, gauss = _NUMPY.unpack_from(part)
    key = np.frombuffer(part[_NUMPY.size :], np.uint32)
    return "MT19937", key, position, has_gauss, gauss


# ---- torch


class _Torch:
    """torch's generator for the CPU. get_state says all of it, in 5 kB that are packed only where
    they have changed; torch keeps its memory to itself.
    """

    def __init__(self) -> None:
        self._part = b""

    def get(self) -> bytes:
        state: Any = torch.default_generator.get_state().numpy()
        if not self._part.startswith(memoryview(state)):
            self._part = state.tobytes()
        return self._part


_python, _numpy, _torch = _Python(), _Numpy(), _Torch()
_last = RngState(b"", b"", b"")
