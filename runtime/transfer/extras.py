"""The own state of a rank, from who keeps it: one request, one answer."""

import socket
import struct
from collections.abc import Mapping

from trainmover.runtime.transfer.wire import Kind, TransferError, Wire

_PART = struct.Struct("!II")  # lengths of name and value


def serve_extras(sock: socket.socket, parts: Mapping[str, bytes], *, deadline_s: float) -> None:
    """Sends the own state of a rank to one puller; blocks.

    Raises TransferError, TimeoutError, ConnectionError.
    """
    wire = Wire(sock, deadline_s)
    request = wire.request()
    if request is None or request.kind is not Kind.EXTRAS:
        raise TransferError(f"expected a request for EXTRAS, got {request and request.kind.name}")
    body = bytearray()
    for name, value in parts.items():
        key = name.encode()
        body += _PART.pack(len(key), len(value)) + key + value
    wire.send(Kind.EXTRAS, body)


def pull_extras(sock: socket.socket, *, deadline_s: float) -> dict[str, bytes]:
    """The own state of a rank, from who keeps it; blocks. Raises as `serve_extras`."""
    wire = Wire(sock, deadline_s)
    wire.ask(Kind.EXTRAS)
    body = wire.body(Kind.EXTRAS, "EXTRAS")
    parts: dict[str, bytes] = {}
    at = 0
    while at < len(body):
        if at + _PART.size > len(body):
            raise TransferError(f"extras end within the header of part {len(parts)}")
        key, value = _PART.unpack_from(body, at)
        at += _PART.size
        if at + key + value > len(body):
            raise TransferError(f"extras end within part {len(parts)}")
        parts[body[at : at + key].decode("utf-8", "replace")] = body[at + key : at + key + value]
        at += key + value
    return parts
