"""The donor's side: registers its shared state once for all pullers, and answers their reads."""

import socket
import threading
from collections.abc import Callable
from weakref import WeakValueDictionary

from trainmover.runtime.transfer.registered import Registered
from trainmover.runtime.transfer.wire import Kind, TransferError, Wire, unpack

Names = tuple[str, ...]
"""Of tracked objects; empty: all."""


class Offers:
    """What is registered, by generation and objects; forgotten with the last who holds it."""

    def __init__(self, register: Callable[[Names], Registered]) -> None:
        self._register = register
        self._known: WeakValueDictionary[tuple[int, Names], Registered] = WeakValueDictionary()
        self._lock = threading.Lock()

    def get(self, generation: int, objects: Names) -> Registered:
        """Registers at the first call; others wait for that. Raises as `register` does."""
        with self._lock:
            found = self._known.get((generation, objects))
            if found is None:
                found = self._known[generation, objects] = self._register(objects)
            return found


def serve(
    sock: socket.socket,
    offer: Callable[[Names], Registered],
    *,
    deadline_s: float,
    allowed: Callable[[], bool] = lambda: True,
) -> None:
    """Answers one connection of a puller until that closes it; blocks.

    `offer` registers the objects that it names, or raises ValueError. The tensors must not change
    while `allowed`. Raises TransferError, TimeoutError, ConnectionError.
    """
    wire = Wire(sock, deadline_s)
    registered: Registered | None = None
    while request := wire.request():
        kind, chunk, asked = request
        if not allowed():
            return wire.refuse("this rank holds no state of that generation, or not any more")
        try:
            if kind is Kind.OPEN:
                registered = offer(tuple(asked.decode().splitlines()))
                wire.send(Kind.OPEN, registered.structure.encode())
            elif registered is None or kind is Kind.EXTRAS:
                raise TransferError(f"expected a request for shared state, got {kind.name}")
            elif kind is Kind.STRUCTURE:
                wire.send(Kind.STRUCTURE, registered.text)
            elif kind is Kind.READ:
                parts = registered.read(chunk)
                value = wire.send_parts(Kind.READ, parts, registered.known(chunk))
                registered.learn(chunk, value)
            else:
                wire.send_hashes(map(registered.checksum, unpack(asked)))
        except ValueError as error:
            wire.refuse(str(error))
