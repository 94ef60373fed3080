"""Buffers of tracked modules: kept at a block's opening, put back by an undo, sent as raw bytes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trainmover.runtime import codec, raw


@dataclass(frozen=True, slots=True)
class _Kept:
    home: dict[str, torch.Tensor | None]
    name: str
    buffer: torch.Tensor | None
    copy: torch.Tensor | None


class Buffers:
    """All buffers below `modules` (also non-persistent ones), by `<module>.<dotted name>`.

    Compared by content, never by version counter: batch norm's kernel writes without counting.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._homes = {
            f"{name}.{path}." if path else f"{name}.": module._buffers
            for name, root in modules.items()
            for path, module in root.named_modules()
        }
        self._kept: list[_Kept] = []
        self._copies: dict[str, torch.Tensor] = {}

    def keep(self) -> None:
        """Copies every buffer into memory that is allocated once."""
        self._kept = []
        if any(self._homes.values()):
            self._kept = [
                _Kept(home, name, buffer, self._copy_for(prefix + name, buffer))
                for prefix, home in self._homes.items()
                if home
                for name, buffer in home.items()
            ]
            self._copy(to_copies=True)

    def put_back(self) -> None:
        """Every buffer is the tensor it was, with the content it had; new ones are gone."""
        for home in self._homes.values():
            home.clear()
        for kept in self._kept:
            kept.home[kept.name] = kept.buffer
        self._copy(to_copies=False)

    def parts(self) -> dict[str, bytes]:
        """A header line (dtype, shape) and the raw bytes of each buffer that is not None."""
        if not any(self._homes.values()):
            return {}
        return {
            prefix + name: _part(buffer)
            for prefix, home in self._homes.items()
            if home
            for name, buffer in home.items()
            if buffer is not None
        }

    def load(self, parts: Mapping[str, bytes]) -> None:
        """Writes `parts` in place. ValueError for a buffer that this rank's module has not."""
        for prefix, home in self._homes.items():
            for name in home:
                part = parts.get(prefix + name)
                home[name] = None if part is None else _loaded(part, home[name])
        known = {prefix + name for prefix, home in self._homes.items() for name in home}
        if unknown := sorted(set(parts) - known):
            raise ValueError(
                f"the donor's buffers {unknown[:3]} do not exist here; register every buffer when "
                "the module is built, not in its first forward"
            )

    def _copy_for(self, key: str, buffer: torch.Tensor | None) -> torch.Tensor | None:
        if buffer is None:
            return None
        local = raw.local(buffer)
        copy = self._copies.get(key)
        if copy is None or (copy.shape, copy.dtype, copy.device) != (
            local.shape,
            local.dtype,
            local.device,
        ):
            copy = self._copies[key] = torch.empty_like(local)
        return copy

    def _copy(self, *, to_copies: bool) -> None:
        pairs = [
            (raw.local(kept.buffer), kept.copy)
            for kept in self._kept
            if kept.buffer is not None and kept.copy is not None
        ]
        if pairs:
            buffers, copies = (list(side) for side in zip(*pairs, strict=True))
            with torch.no_grad():
                torch._foreach_copy_(*(copies, buffers) if to_copies else (buffers, copies))


def _part(buffer: torch.Tensor) -> bytes:
    local = raw.local(buffer)
    return f'["{local.dtype}",{list(local.shape)}]\n'.encode() + raw.to_bytes(local)


def _loaded(part: bytes, buffer: torch.Tensor | None) -> torch.Tensor:
    """`buffer` with the part's content, or a new tensor where it does not fit."""
    header, _, data = part.partition(b"\n")
    dtype, shape = json.loads(header)
    source = raw.from_bytes(data, codec.dtype(dtype), tuple(shape))
    if buffer is None:
        return source
    local = raw.local(buffer)
    if local.shape != source.shape or local.dtype != source.dtype:
        return source.to(local.device)
    with torch.no_grad():
        local.copy_(source)
    return buffer
