"""The four messages by which two workers prove to each other that they belong to one job."""

import os
import secrets
import select
import socket
import time
from typing import NoReturn

from trainmover.runtime import shm, wire
from trainmover.runtime.fence import Cancellation
from trainmover.runtime.shm import Memory

LIMIT_S = 5.0
"""A handshake takes no longer, on either side."""


class Handshake:
    """One side of it, on a fresh connection.

    Its methods block until `deadline` (monotonic) at most. They raise OSError (TimeoutError when
    time is over), wire.WireError for what is no handshake, wire.Refused when a side does not agree,
    and Revoked when `cancellation` cancels `generation`. None of them closes `sock`.
    """

    def __init__(
        self,
        sock: socket.socket,
        deadline: float,
        generation: int = 0,
        cancellation: Cancellation | None = None,
    ) -> None:
        self._sock, self._deadline = sock, deadline
        self._generation, self._cancellation = generation, cancellation
        sock.setblocking(False)

    def connect(self, address: str | tuple[object, ...]) -> None:
        """Before all else, where this side dials."""
        try:
            self._sock.connect(address)
        except BlockingIOError:
            if self._sock.family == socket.AF_UNIX:
                raise  # too many wait to be accepted: a poll would not tell
            self._wait(select.POLLOUT)
            if code := self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, os.strerror(code)) from None

    def introduce(
        self, hello: wire.Hello, peer: str, secret: bytes, *, share_memory: bool
    ) -> Memory | None:
        """The dialer's side. Memory of both ends, where it is wanted and the peer is near."""
        self._send(wire.encode_greeting(hello))
        welcome = self._receive(wire.Welcome)
        if welcome.worker != peer:
            self._refuse(f"expected worker {peer} at this address, got {welcome.worker}")
        if not wire.proven(secret, "acceptor", hello, welcome.worker, welcome.nonce, welcome.proof):
            self._refuse("expected a proof of the job's secret, got another: set it")
        proof = wire.proof(secret, "dialer", hello, welcome.worker, welcome.nonce)
        answer = wire.encode_greeting(wire.Answer(proof=proof))
        memory = None
        if share_memory and self._sock.family == socket.AF_UNIX:
            fd = shm.create()
            try:
                socket.send_fds(self._sock, [answer], [fd])
            except OSError:
                os.close(fd)
                raise
            memory = Memory(fd, dialer=True)
        else:
            self._send(answer)
        self._receive(wire.Verdict)
        return memory

    def authenticate(
        self, job: str, worker: str, secret: bytes
    ) -> tuple[wire.Hello, Memory | None]:
        """The acceptor's side: who dialed, for what, and the memory that came with it."""
        try:
            hello = self._receive(wire.Hello)
        except wire.WireError as error:
            self._refuse(str(error))
        if hello.job != job:
            self._refuse(f"expected job {job}, got {hello.job}")
        nonce = secrets.token_hex(16)
        proof = wire.proof(secret, "acceptor", hello, worker, nonce)
        self._send(wire.encode_greeting(wire.Welcome(worker=worker, nonce=nonce, proof=proof)))
        fds: list[int] = []
        try:
            given = self._receive(wire.Answer, fds).proof
            if not wire.proven(secret, "dialer", hello, worker, nonce, given):
                self._refuse("expected a proof of the job's secret, got another: set it")
            memory = Memory(fds.pop(), dialer=False) if fds else None
        finally:
            for fd in fds:
                os.close(fd)
        self._send(wire.encode_greeting(wire.Verdict(accepted=True)))
        return hello, memory

    def _refuse(self, reason: str) -> NoReturn:
        self._send(wire.encode_refusal(reason))
        raise wire.Refused(reason)

    def _send(self, data: bytes) -> None:
        while data:
            try:
                data = data[self._sock.send(data) :]
            except BlockingIOError:
                self._wait(select.POLLOUT)

    def _receive(
        self, expected: type[wire.MessageT], fds: list[int] | None = None
    ) -> wire.MessageT:
        """A greeting; descriptors that come with it are appended to `fds`, if that is given."""
        length = wire.greeting_length(self._exactly(wire.PRELUDE_BYTES, fds))
        return wire.decode_greeting(self._exactly(length), expected)

    def _exactly(self, size: int, fds: list[int] | None = None) -> bytes:
        data = b""
        while len(data) < size:
            self._wait(select.POLLIN)
            try:
                if fds is not None and self._sock.family == socket.AF_UNIX:
                    piece, came, _, _ = socket.recv_fds(self._sock, size - len(data), 1)
                    fds += came
                else:
                    piece = self._sock.recv(size - len(data))
            except BlockingIOError:
                continue
            if not piece:
                raise ConnectionError("the other side closed the connection within the handshake")
            data += piece
        return data

    def _wait(self, event: int) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"expected a handshake within {LIMIT_S:g} s")
        poller = select.poll()
        poller.register(self._sock, event)
        if self._cancellation is None:
            poller.poll(left_s * 1000)
        else:
            self._cancellation.poll(self._generation, poller, left_s)
