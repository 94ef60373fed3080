"""Who gets in: handshakes over real sockets."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainmover.runtime import wire
from trainmover.runtime.endpoint import Connection, Endpoint

Make = Callable[..., Endpoint]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Endpoint] = []

    def build(worker: str, job: str = "job", secret: bytes = b"secret") -> Endpoint:
        directory = tmp_path / f"{len(made)}"
        directory.mkdir()
        made.append(Endpoint(job, worker, "m0", secret, directory))
        return made[-1]

    yield build
    for endpoint in made:
        endpoint.close()


def tcp(endpoint: Endpoint) -> tuple[str, ...]:
    return tuple(a for a in endpoint.addresses if a.startswith("tcp:"))


def stranger(endpoint: Endpoint) -> socket.socket:
    _, host, port = tcp(endpoint)[0].split(":")
    return socket.create_connection((host, int(port)), timeout=2)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_two_workers_of_one_job_get_connected(make: Make, kind: str) -> None:
    a, b = make("a"), make("b")
    addresses = tuple(x for x in b.addresses if x.startswith(kind))
    dialed = a.dial(addresses, "b", "control", 7, 2)
    accepted = b.accept("a", "control", 7, 2)
    dialed.sock.sendall(b"hello")
    assert accepted.sock.recv(5) == b"hello"
    assert (accepted.peer, accepted.channel, accepted.generation) == ("a", "control", 7)
    expected = socket.AF_UNIX if kind == "unix" else socket.AF_INET
    assert dialed.sock.family == expected
    for connection in (dialed, accepted):
        connection.close()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_memory_is_shared_where_the_dialer_wants_it_and_the_peer_is_near(
    make: Make, kind: str
) -> None:
    a, b = make("a"), make("b")
    addresses = tuple(x for x in b.addresses if x.startswith(kind))
    dialed = a.dial(addresses, "b", "0-1#0", 7, 2, share_memory=True)
    accepted = b.accept("a", "0-1#0", 7, 2)
    if kind == "tcp":
        assert dialed.memory is accepted.memory is None
    else:
        assert dialed.memory is not None
        assert accepted.memory is not None
        dialed.memory.out.next()[:5] = b"hello"
        assert bytes(accepted.memory.into.oldest()[:5]) == b"hello"
    for connection in (dialed, accepted):
        connection.close()


def test_the_unix_socket_is_preferred_and_tcp_taken_where_its_path_is_missing(make: Make) -> None:
    a, b = make("a"), make("b")
    for addresses, family in (
        (b.addresses, socket.AF_UNIX),
        (("unix:/nowhere/b.sock", *tcp(b)), socket.AF_INET),
    ):
        connection = a.dial(addresses, "b", "control", 1, 2)
        assert connection.sock.family == family
        connection.close()


def test_another_job_is_refused_with_the_reason(make: Make) -> None:
    a, b = make("a", job="other"), make("b")
    with pytest.raises(wire.Refused, match="expected job job, got other"):
        a.dial(b.addresses, "b", "control", 1, 2)


def test_another_secret_is_refused_with_the_reason(make: Make) -> None:
    a, b = make("a", secret=b"guess"), make("b")
    with pytest.raises(wire.Refused, match="proof of the job's secret"):
        a.dial(b.addresses, "b", "control", 1, 2)
    assert b.take("a", "control", 1) is None


def test_a_dialer_without_the_secret_gets_a_refusal_and_no_connection(make: Make) -> None:
    b = make("b")
    hello = wire.Hello(job="job", worker="a", generation=1, channel="control", nonce="0" * 32)
    with stranger(b) as sock:
        sock.sendall(wire.encode_greeting(hello))
        assert b'"proof"' in sock.recv(4096)
        sock.sendall(wire.encode_greeting(wire.Answer(proof="0" * 64)))
        answer = sock.recv(4096)
        assert b"refused" in answer
        assert sock.recv(1) == b""
    assert b.take("a", "control", 1) is None


def test_another_worker_behind_an_address_is_refused(make: Make) -> None:
    a, b = make("a"), make("b")
    with pytest.raises(wire.Refused, match="expected worker c at this address, got b"):
        a.dial(b.addresses, "c", "control", 1, 2)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"TMV1"),
        (b"TMV0" + struct.pack("<H", 2) + b"{}", b"TMV0"),
        (wire.MAGIC + struct.pack("<H", 60_000), b"at most 4096"),
        (wire.MAGIC + struct.pack("<H", 2) + b"{}", b"expected a Hello"),
    ],
)
def test_what_is_no_greeting_gets_a_refusal_and_an_eof(
    make: Make, sent: bytes, reason: bytes
) -> None:
    b = make("b")
    with stranger(b) as sock:
        sock.sendall(sent)
        received = b""
        try:
            while piece := sock.recv(4096):
                received += piece
        except ConnectionResetError:
            pass  # bytes it did not read; the refusal went out before
        assert b"refused" in received
        assert reason in received


def test_a_silent_stranger_does_not_keep_others_out(make: Make) -> None:
    a, b = make("a"), make("b")
    with stranger(b), stranger(b):
        a.dial(tcp(b), "b", "control", 1, 2).close()


def test_nobody_at_the_address_is_an_error_that_says_so(make: Make) -> None:
    a = make("a")
    with pytest.raises(ConnectionError, match="expected worker b to answer for channel control"):
        a.dial(("unix:/nowhere", "tcp:127.0.0.1:1"), "b", "control", 1, 2)


def test_accept_hands_out_the_generation_asked_for_and_older_ones_can_be_withdrawn(
    make: Make,
) -> None:
    a, b = make("a"), make("b")
    old, new = (a.dial(b.addresses, "b", "control", g, 2) for g in (1, 2))
    b.accept("a", "control", 2, 2).close()
    with pytest.raises(TimeoutError, match="expected worker a to dial"):
        b.accept("a", "control", 2, 0.01)
    assert b.withdraw(range(2), lambda channel: channel == "other") == []
    withdrawn = b.withdraw(range(2), lambda channel: channel == "control")
    assert [c.generation for c in withdrawn] == [1]
    for connection in (old, new, *withdrawn):
        connection.close()


def test_a_served_channel_gets_each_connection_in_a_thread(make: Make) -> None:
    a, b = make("a"), make("b")
    served = threading.Event()

    def handler(connection: Connection) -> None:
        connection.sock.sendall(b"state")
        connection.close()
        served.set()

    b.serve("state", handler)
    connection = a.dial(b.addresses, "b", "state", 4, 2)
    assert connection.sock.recv(5) == b"state"
    assert served.wait(2)
    connection.close()


def test_a_path_too_long_for_the_system_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 100)
    directory.mkdir()
    with pytest.raises(ValueError, match="at most 107 bytes"):
        Endpoint("job", "a", "m0", b"", directory)


def test_the_port_range_is_kept(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"free port in {port}-{port}"):
            Endpoint("job", "a", "m0", b"", tmp_path, port_range=(port, port))
