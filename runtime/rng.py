"""The states of this process's global random number generators: python, numpy, torch, device."""

import ctypes
import hashlib
import random
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_PYTHON = struct.Struct("<i?d")  # version, has gauss, gauss
_NUMPY = struct.Struct("<iid")  # position, has gauss, gauss
_MT19937_BYTES = 625 * 4  # numpy's mt19937_state: key[624], pos


@dataclass(frozen=True, slots=True)
class RngState:
    """All generators at one moment, copied; `cpu` is torch's. `device` is None without CUDA."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    cpu: torch.Tensor
    device: torch.Tensor | None


def capture() -> RngState:
    """Cheap (25 us): numpy's state is read in full only if it may have changed."""
    device = torch.cuda.get_rng_state() if _has_device() else None
    return RngState(random.getstate(), _numpy.get(), torch.get_rng_state(), device)


def restore(state: RngState) -> None:
    """Puts every generator back, exactly."""
    random.setstate(state.python)
    _numpy.set(state.numpy)
    torch.set_rng_state(state.cpu)
    if state.device is not None:
        torch.cuda.set_rng_state(state.device)


def to_parts(state: RngState) -> dict[str, bytes]:
    """The bytes form, one part for each generator, so that one that rests is not sent again."""
    version, internal, gauss = state.python
    _, key, position, has_gauss, cached = state.numpy
    parts = {
        "python": _PYTHON.pack(version, gauss is not None, gauss or 0.0)
        + array("I", internal).tobytes(),
        "numpy": _NUMPY.pack(position, has_gauss, cached) + key.tobytes(),
        "cpu": state.cpu.numpy().tobytes(),
    }
    if state.device is not None:
        parts["device"] = state.device.numpy().tobytes()
    return parts


def from_parts(parts: Mapping[str, bytes]) -> RngState:
    """The state that `to_parts` wrote. Raises ValueError for a missing or malformed part."""
    try:
        version, has_gauss, gauss = _PYTHON.unpack_from(parts["python"])
        internal = array("I", parts["python"][_PYTHON.size :])
        position, numpy_has_gauss, cached = _NUMPY.unpack_from(parts["numpy"])
        key = np.frombuffer(parts["numpy"][_NUMPY.size :], np.uint32)
        state = parts["cpu"]
    except (KeyError, struct.error, ValueError) as e:
        raise ValueError(f"not the random state of a rank: {e!r}") from e
    return RngState(
        (version, tuple(internal), gauss if has_gauss else None),
        ("MT19937", key, position, numpy_has_gauss, cached),
        torch.frombuffer(bytearray(state), dtype=torch.uint8),
        torch.frombuffer(bytearray(parts["device"]), dtype=torch.uint8)
        if "device" in parts
        else None,
    )


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
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


class _NumpyGlobal:
    """numpy's legacy generator. get_state costs 90 us, so its last answer is kept while it holds.

    It holds while the 2500 bytes of the twister are the same and no second normal was cached: that
    one can be used up without a trace in those bytes.
    """

    def __init__(self) -> None:
        self._seen: tuple[int, bytes] | None = None
        self._state: tuple[Any, ...] = ()

    def get(self) -> tuple[Any, ...]:
        now = self._twister()
        if now != self._seen or self._state[3]:
            state: Any = np.random.get_state()
            self._seen, self._state = now, state
        return self._state

    def set(self, state: tuple[Any, ...]) -> None:
        np.random.set_state(state)
        self._seen, self._state = self._twister(), state

    def _twister(self) -> tuple[int, bytes]:
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if not isinstance(generator, np.random.MT19937):
            raise TypeError(
                "expected numpy's global generator to be the MT19937 it starts with, got "
                f"{type(generator).__name__}; make a np.random.Generator of your own instead"
            )
        address = generator.ctypes.state_address
        return address, ctypes.string_at(address, _MT19937_BYTES)


_numpy = _NumpyGlobal()
