"""The bytes of a tensor, in row-major order, whatever its strides, dtype and device.

Contiguous CPU tensors are read and written in place; others pass through one small scratch.
"""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch

CHUNK = 2 << 20  # bytes; the largest piece that is read, sent or hashed at once


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of `tensor` (a DTensor's shard), detached; shares its memory."""
    to_local = getattr(tensor, "to_local", None)  # importing DTensor costs more than a second
    shard: torch.Tensor = tensor if to_local is None else to_local()
    return shard.detach()


def is_dense(tensor: torch.Tensor) -> bool:
    """True for a local tensor whose bytes are all there is to it."""
    return not (tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta)


def to_bytes(tensor: torch.Tensor) -> bytes:
    """A copy of all bytes. Blocks until a device has computed them."""
    return _view(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()).tobytes()


def from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A new CPU tensor. Raises ValueError where `data` does not fill `shape` exactly."""
    if len(data) != prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes do not fill {dtype} of shape {shape}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


def pieces(tensor: torch.Tensor) -> Iterator[tuple[int, memoryview]]:
    """(offset, bytes) of at most CHUNK each; a piece is valid only until the next is taken."""
    region = Region(tensor)
    for offset in range(0, region.nbytes, CHUNK):
        yield offset, region.read(offset, min(CHUNK, region.nbytes - offset))


class Region:
    """The bytes of one tensor, read and written at any offset.

    Several threads may use it at once, for different bytes.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.nbytes = tensor.nbytes
        self._direct = _view(tensor) if _is_direct(tensor) else None

    @property
    def direct(self) -> bool:
        """Read and written in place, without a scratch between."""
        return self._direct is not None

    def same_memory(self, other: "Region") -> bool:
        """Both are the same bytes in place, so that what was read of one holds for the other."""
        one, two = self._tensor, other._tensor
        return (
            self.direct
            and other.direct
            and ((one.data_ptr(), one.nbytes, one.dtype) == (two.data_ptr(), two.nbytes, two.dtype))
        )

    @property
    def extent(self) -> tuple[str, int, int]:
        """Device, first address, and the one behind the last."""
        tensor, first = self._tensor, self._tensor.data_ptr()
        reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        return str(tensor.device), first, first + (reach + 1) * tensor.itemsize

    def read(self, offset: int, length: int) -> memoryview:
        """The bytes there; ValueError outside the tensor. Blocks until a device has them."""
        self._check(offset, length)
        if self._direct is not None:
            return self._direct[offset : offset + length]
        scratch = torch.empty(length // self._tensor.itemsize, dtype=self._tensor.dtype)
        at = 0
        for span in self._spans(offset, length):
            scratch[at : at + span.numel()].view(span.shape).copy_(span)
            at += span.numel()
        return _view(scratch)

    def window(self, offset: int, length: int) -> "Window":
        """Memory for the bytes there; ValueError outside the tensor."""
        self._check(offset, length)
        if self._direct is not None:
            return Window(self._direct[offset : offset + length], lambda: None)
        scratch = torch.empty(length // self._tensor.itemsize, dtype=self._tensor.dtype)

        def write() -> None:
            at = 0
            with torch.no_grad():
                for span in self._spans(offset, length):
                    span.copy_(scratch[at : at + span.numel()].view(span.shape))
                    at += span.numel()

        return Window(_view(scratch), write)

    def _spans(self, offset: int, length: int) -> Iterator[torch.Tensor]:
        size = self._tensor.itemsize
        return _spans(self._tensor, offset // size, (offset + length) // size)

    def _check(self, offset: int, length: int) -> None:
        size = self._tensor.itemsize
        whole = offset % size == 0 and length % size == 0
        if not (0 < length <= CHUNK and 0 <= offset <= self.nbytes - length and whole):
            raise ValueError(
                f"{length} bytes at offset {offset} are not part of a tensor of {self.nbytes} bytes"
            )


class Window(NamedTuple):
    """Where bytes for a tensor go; `written` puts them into it, once they are all there."""

    memory: memoryview
    written: Callable[[], None]


def _is_direct(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _view(tensor: torch.Tensor) -> memoryview:
    # as_strided: a tensor of one element counts as contiguous whatever its strides
    flat: Any = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(flat)


def _spans(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Views that hold elements start..stop of `tensor` in row-major order."""
    if tensor.dim() <= 1:
        yield tensor[start:stop] if tensor.dim() else tensor.reshape(1)
        return
    row = tensor[0].numel()
    first, last = -(-start // row), stop // row
    if first > last:  # all within one row
        yield from _spans(tensor[last], start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _spans(tensor[first - 1], start - (first - 1) * row, row)
    if first < last:
        yield tensor[first:last]
    if last * row < stop:
        yield from _spans(tensor[last], 0, stop - last * row)
