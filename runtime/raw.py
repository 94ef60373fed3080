"""The bytes of a tensor, in row-major order, whatever its strides, dtype and device.

Contiguous CPU tensors are read and written in place; others pass through one small scratch.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

CHUNK = 1 << 20  # bytes; the largest piece that is read, sent or hashed at once


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
    if _is_direct(tensor):
        view = _view(tensor)
        for offset in range(0, len(view), CHUNK):
            yield offset, view[offset : offset + CHUNK]
        return
    step = CHUNK // tensor.itemsize
    scratch = torch.empty(min(step, tensor.numel()), dtype=tensor.dtype)
    for start in range(0, tensor.numel(), step):
        stop = min(start + step, tensor.numel())
        at = 0
        for span in _spans(tensor, start, stop):
            scratch[at : at + span.numel()].view(span.shape).copy_(span)
            at += span.numel()
        yield start * tensor.itemsize, _view(scratch[:at])


class Writer:
    """Writes pieces of bytes into one tensor; `window` gives the memory, `written` ends a piece."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._direct = _view(tensor) if _is_direct(tensor) else None
        self._scratch: torch.Tensor | None = None

    def window(self, offset: int, length: int) -> memoryview:
        """Memory for `length` bytes at `offset`. Raises ValueError outside the tensor."""
        size, total = self._tensor.itemsize, self._tensor.nbytes
        whole = offset % size == 0 and length % size == 0
        if length <= 0 or length > CHUNK or offset + length > total or not whole:
            raise ValueError(
                f"{length} bytes at offset {offset} are not part of a tensor of {total} bytes"
            )
        if self._direct is not None:
            return self._direct[offset : offset + length]
        self._scratch = torch.empty(length // size, dtype=self._tensor.dtype)
        return _view(self._scratch)

    def written(self, offset: int) -> None:
        """The window at `offset` holds its bytes now."""
        if self._scratch is None:
            return
        start = offset // self._tensor.itemsize
        at = 0
        with torch.no_grad():
            for span in _spans(self._tensor, start, start + self._scratch.numel()):
                span.copy_(self._scratch[at : at + span.numel()].view(span.shape))
                at += span.numel()
        self._scratch = None


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
