"""The door of a worker: it listens, dials, and lets only authenticated peers of its job in."""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path

from trainmover.runtime import handshake, wire
from trainmover.runtime.fence import Cancellation
from trainmover.runtime.handshake import Handshake
from trainmover.runtime.link import close_in_children
from trainmover.runtime.shm import Memory

_HANDSHAKES = 64  # at the same time; more are turned away, so that strangers cost us little
_PENDING = 4096  # authenticated connections that nobody has asked for yet; the oldest go first
_UNIX_BUFFER_BYTES = 1024 * 1024  # the default takes no whole frame: a third more CPU at 16 MiB
_UNIX_PATH_BYTES = 107  # sun_path of Linux, without its end

_Key = tuple[str, str, int]


@dataclass(frozen=True, eq=False)
class Connection:
    """An authenticated connection; `sock` blocks, without a timeout, until somebody changes it."""

    sock: socket.socket
    peer: str
    channel: str
    generation: int
    memory: Memory | None = None
    """Shared with the peer, if it is on this machine and the dialer wanted it."""

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


class Endpoint:
    """Listens on a Unix socket below `directory` and on TCP, from construction to `close`.

    `secret` is the job's; `port_range` (first, last) limits the TCP port. Raises OSError when
    nothing can be bound and ValueError when the Unix path is too long for the system.
    """

    def __init__(
        self,
        job: str,
        worker: str,
        machine: str,
        secret: bytes,
        directory: Path,
        host: str = "127.0.0.1",
        port_range: tuple[int, int] | None = None,
    ) -> None:
        self.job, self.worker, self.machine = job, worker, machine
        self._secret = secret
        path = directory / f"{worker}.sock"
        tcp = _listen_tcp(host, port_range)
        try:
            self._listeners = (_listen_unix(path), tcp)
        except BaseException:
            tcp.close()
            raise
        self._path = path
        port = tcp.getsockname()[1]
        self.addresses: tuple[str, ...] = (f"unix:{path}", f"tcp:{host}:{port}")
        self._pending: dict[_Key, Connection] = {}
        self._handlers: dict[str, Callable[[Connection], None]] = {}
        self._arrived = threading.Condition()
        self.arrival_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable after an arrival; for the one loop that waits for many peers at once."""
        self._slots = threading.BoundedSemaphore(_HANDSHAKES)
        self._closed = False
        self._threads = [
            threading.Thread(target=self._listen, args=(s,), name="endpoint", daemon=True)
            for s in self._listeners
        ]
        for thread in self._threads:
            thread.start()

    def dial(
        self,
        addresses: tuple[str, ...],
        peer: str,
        channel: str,
        generation: int,
        deadline_s: float,
        *,
        share_memory: bool = False,
        cancellation: Cancellation | None = None,
    ) -> Connection:
        """Connect to worker `peer`, by Unix socket where its path exists, else by TCP.

        With `share_memory` a connection by Unix socket brings memory that both ends map.

        Blocks for `deadline_s` seconds at most, and until `cancellation` cancels `generation`, of
        which only the training thread may wait. Raises ConnectionError with the reason of each
        address, wire.Refused when the peer turns us away, Revoked when it is cancelled.
        """
        deadline = time.monotonic() + min(deadline_s, handshake.LIMIT_S)
        hello = wire.Hello(
            job=self.job,
            worker=self.worker,
            generation=generation,
            channel=channel,
            nonce=secrets.token_hex(16),
        )
        failures = []
        for address in sorted(addresses, reverse=True):  # unix before tcp
            try:
                sock, where = _socket_for(address)
            except OSError as error:
                failures.append(f"{address}: {error}")
                continue
            try:
                talk = Handshake(sock, deadline, generation, cancellation)
                talk.connect(where)
                memory = talk.introduce(hello, peer, self._secret, share_memory=share_memory)
                return _ready(Connection(sock, peer, channel, generation, memory))
            except (OSError, wire.WireError) as error:
                sock.close()
                failures.append(f"{address}: {error}")
            except BaseException:
                sock.close()
                raise
        raise ConnectionError(
            f"expected worker {peer} to answer for channel {channel}, generation {generation}; "
            f"got {'; '.join(failures) or 'no address'}: check that it runs and is reachable"
        )

    def accept(self, peer: str, channel: str, generation: int, deadline_s: float) -> Connection:
        """The connection that `peer` dialed for (channel, generation).

        Blocks for `deadline_s` seconds at most, then raises TimeoutError.
        """
        key = (channel, peer, generation)
        with self._arrived:
            if not self._arrived.wait_for(lambda: key in self._pending, deadline_s):
                raise TimeoutError(
                    f"expected worker {peer} to dial for channel {channel}, generation "
                    f"{generation} within {deadline_s} s, got nothing: check that it is alive"
                )
            return self._pending.pop(key)

    def take(self, peer: str, channel: str, generation: int) -> Connection | None:
        """Like `accept`, without waiting: None while the peer has not dialed."""
        with self._arrived:
            return self._pending.pop((channel, peer, generation), None)

    def withdraw(
        self, generations: Container[int], mine: Callable[[str], bool]
    ) -> list[Connection]:
        """Remove and return what nobody took of these generations, for the channels that are
        `mine`."""
        with self._arrived:
            old = [key for key in self._pending if key[2] in generations and mine(key[0])]
            return [self._pending.pop(key) for key in old]

    def serve(self, channel: str, handler: Callable[[Connection], None]) -> None:
        """Run `handler` in a daemon thread for each connection that comes for `channel`.

        The handler owns the connection. Connections of every generation are served.
        """
        self._handlers[channel] = handler

    def close(self) -> None:
        """Stop listening and close what nobody took; connections handed out live on."""
        self._closed = True
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
            listener.close()
        for thread in self._threads:
            thread.join(timeout=handshake.LIMIT_S)
        self._path.unlink(missing_ok=True)
        with self._arrived:
            for connection in self._pending.values():
                connection.close()
            self._pending.clear()
        os.close(self.arrival_fd)

    def _listen(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                sock, _ = listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # out of descriptors: others may give some back
                continue
            close_in_children(sock)
            if not self._slots.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._admit, args=(sock,), daemon=True).start()

    def _admit(self, sock: socket.socket) -> None:
        try:
            talk = Handshake(sock, time.monotonic() + handshake.LIMIT_S)
            hello, memory = talk.authenticate(self.job, self.worker, self._secret)
            connection = _ready(
                Connection(sock, hello.worker, hello.channel, hello.generation, memory)
            )
        except (OSError, wire.WireError, wire.Refused):
            sock.close()
            return
        finally:
            self._slots.release()
        handler = self._handlers.get(connection.channel)
        if handler is not None:
            handler(connection)
            return
        key = (connection.channel, connection.peer, connection.generation)
        with self._arrived:
            unwanted = [self._pending.pop(key, None)]
            if self._closed:
                unwanted.append(connection)
            else:
                if len(self._pending) >= _PENDING:
                    unwanted.append(self._pending.pop(min(self._pending, key=lambda k: k[2])))
                self._pending[key] = connection
                os.eventfd_write(self.arrival_fd, 1)
                self._arrived.notify_all()
        for each in unwanted:
            if each is not None:
                each.close()


def _listen_unix(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > _UNIX_PATH_BYTES:
        raise ValueError(
            f"expected a socket path of at most {_UNIX_PATH_BYTES} bytes, got {path}: "
            "choose a shorter directory"
        )
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    close_in_children(listener)
    listener.bind(str(path))
    listener.listen(1024)
    return listener


def _listen_tcp(host: str, port_range: tuple[int, int] | None) -> socket.socket:
    first, last = port_range or (0, 0)
    for port in range(first, last + 1):
        try:
            listener = socket.create_server((host, port), backlog=1024)
        except OSError as error:
            reason = error
            continue
        close_in_children(listener)
        return listener
    raise OSError(f"expected a free port in {first}-{last} on {host}, got: {reason}")


def _socket_for(address: str) -> tuple[socket.socket, str | tuple[object, ...]]:
    """A socket, and what it is to be connected to."""
    scheme, _, place = address.partition(":")
    if scheme == "unix":
        if not os.path.exists(place):
            raise FileNotFoundError("the peer is on another machine, or gone")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        close_in_children(sock)
        return sock, place
    host, _, port = place.rpartition(":")
    ((*_, where), *_) = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    close_in_children(sock)
    return sock, where


def _ready(connection: Connection) -> Connection:
    connection.sock.settimeout(None)
    if connection.sock.family == socket.AF_UNIX:
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_BUFFER_BYTES)
    else:
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
