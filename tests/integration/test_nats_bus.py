"""A real NATS server: the common behaviour, restarts, and what is wrong with a server."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from tests.integration.bus_behaviour import BusBehaviour, first

from trainmover.bus.nats import QUIET_S, NatsBus, connect
from trainmover.bus.port import MSG_ID, Bus, BusUnreachable, Message, NoJetStream, Reply, Unanswered
from trainmover.bus.server import EmbeddedServer, ServerFailed, find_binary

STARTED = "trainmover.j.job.started.v1"
FAILED = "trainmover.j.worker.failed.v1"
COMMAND = "trainmover.j.command.w1.v1"

Connect = Callable[[], Awaitable[NatsBus]]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path / "bus", token="secret-token")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def connected(server: EmbeddedServer) -> AsyncIterator[Connect]:
    buses: list[NatsBus] = []

    async def one_more() -> NatsBus:
        buses.append(await connect(server.url, "j", deadline_s=10))
        return buses[-1]

    yield one_more
    for bus in buses:
        await bus.close()


async def kill(server: EmbeddedServer) -> None:
    os.kill(server.pid, signal.SIGKILL)
    assert await server.wait() == -signal.SIGKILL


class TestNatsBus(BusBehaviour):
    @pytest.fixture
    async def bus(self, connected: Connect) -> Bus:
        return await connected()


async def test_followers_lose_and_repeat_nothing_when_the_server_is_killed_and_restarted(
    server: EmbeddedServer, connected: Connect
) -> None:
    publisher, reader = await connected(), await connected()
    up_since = reader.up_since
    following = asyncio.ensure_future(first(reader.follow(0), 90))

    async def publish(numbers: range) -> None:
        for n in numbers:
            await publisher.publish(FAILED, b"%d" % n, {MSG_ID: f"r/{n}"})

    for start in (0, 45):
        await publish(range(start, start + 20))
        publishing = asyncio.ensure_future(publish(range(start + 20, start + 45)))
        await asyncio.sleep(0)
        await kill(server)
        await server.start()
        async with asyncio.timeout(20):
            await publishing
    messages = await following
    assert [m.seq for m in messages] == list(range(1, 91))
    assert [m.payload for m in messages] == [b"%d" % n for n in range(90)]
    assert await publisher.last_seq() == 90
    assert reader.up_since > up_since


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_bus_is_up_since_now_while_its_server_is_dead_or_hangs(
    server: EmbeddedServer, connected: Connect, how: signal.Signals
) -> None:
    bus = await connected()
    following = asyncio.ensure_future(first(bus.follow(0), 1))
    before = bus.up_since
    await asyncio.sleep(2 * QUIET_S)  # heartbeats are enough
    assert bus.up_since == before
    os.kill(server.pid, how)
    await asyncio.sleep(2 * QUIET_S)  # silence is the subject of this test
    away_s = time.monotonic()
    assert bus.up_since >= away_s
    if how is signal.SIGKILL:
        await server.wait()
        await server.start()
    else:
        os.kill(server.pid, signal.SIGCONT)
    await bus.publish(STARTED, b"", {})
    await following
    assert away_s < bus.up_since < time.monotonic()


async def test_a_follower_loses_and_repeats_nothing_when_only_its_own_connection_breaks(
    connected: Connect,
) -> None:
    publisher, reader = await connected(), await connected()
    following = asyncio.ensure_future(first(reader.follow(0), 600))
    for burst in range(6):
        publishing = [publisher.publish(FAILED, b"", {MSG_ID: f"{burst}/{n}"}) for n in range(100)]
        breaking = reader._client.force_reconnect()
        await asyncio.gather(*publishing, breaking)
    assert [m.seq for m in await following] == list(range(1, 601))


async def test_a_request_whose_connection_breaks_is_unanswered_at_once(
    server: EmbeddedServer, connected: Connect
) -> None:
    bus, worker = await connected(), await connected()
    asked = asyncio.Event()

    async def answer(message: Message) -> Reply | None:
        if message.payload == b"again":
            return b"here", {}
        asked.set()
        return None

    await worker.respond(COMMAND, answer)
    request = asyncio.ensure_future(bus.request(COMMAND, b"", {}, 60))
    await asked.wait()
    await kill(server)
    async with asyncio.timeout(10):
        with pytest.raises(Unanswered):
            await request
        await server.start()
        while True:
            with suppress(Unanswered):  # the worker may come back later than who asks
                assert (await bus.request(COMMAND, b"again", {}, 1)).payload == b"here"
                break


async def test_a_publisher_waits_for_a_server_that_is_away(
    server: EmbeddedServer, connected: Connect
) -> None:
    bus = await connected()
    await bus.publish(STARTED, b"before", {MSG_ID: "1"})
    await kill(server)
    waiting = asyncio.ensure_future(bus.publish(FAILED, b"meanwhile", {MSG_ID: "2"}))
    deciding = asyncio.ensure_future(bus.publish_expecting(STARTED, b"x", {MSG_ID: "3"}, 1))
    with pytest.raises(Unanswered):
        await bus.request(COMMAND, b"", {}, 0.1)
    assert not waiting.done()
    await server.start()
    async with asyncio.timeout(10):
        assert {await waiting, await deciding} == {2, 3}
        assert await bus.publish(STARTED, b"before", {MSG_ID: "1"}) == 1  # still known


async def test_listeners_and_responders_are_back_after_a_restart(
    server: EmbeddedServer, connected: Connect
) -> None:
    asker, worker = await connected(), await connected()

    async def answer(message: Message) -> tuple[bytes, dict[str, str]]:
        return message.payload, {}

    await worker.respond(COMMAND, answer)
    await kill(server)
    await server.start()
    async with asyncio.timeout(10):
        while True:
            try:
                assert (await asker.request(COMMAND, b"x", {}, 1)).payload == b"x"
                return
            except Unanswered:
                await asyncio.sleep(0.02)


async def test_what_the_server_stored_is_there_for_a_new_server_on_the_same_directory(
    server: EmbeddedServer, connected: Connect, tmp_path: Path
) -> None:
    await (await connected()).publish(STARTED, b"kept", {})
    await server.stop()
    again = EmbeddedServer(tmp_path / "bus")
    await again.start()
    bus = await connect(again.url, "j", deadline_s=10)
    assert [m.payload for m in await first(bus.follow(0), 1)] == [b"kept"]
    await bus.close()
    await again.stop()


async def test_nobody_at_the_address_is_said_within_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    async with asyncio.timeout(5):
        with pytest.raises(BusUnreachable, match=rf"127\.0\.0\.1:{port} .*check that it runs") as e:
            await connect(f"nats://hush@127.0.0.1:{port}", "j", deadline_s=0.3)
    assert "hush" not in str(e.value)


async def test_an_address_that_takes_connections_and_says_nothing_is_unreachable() -> None:
    @asynccontextmanager
    async def mute() -> AsyncIterator[int]:
        async def hold(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await _reader.read()
            writer.close()

        server = await asyncio.start_server(hold, "127.0.0.1", 0)
        yield server.sockets[0].getsockname()[1]
        server.close()

    async with mute() as port, asyncio.timeout(5):
        with pytest.raises(BusUnreachable):
            await connect(f"nats://127.0.0.1:{port}", "j", deadline_s=0.3)


async def test_a_wrong_token_is_named_as_the_cause(server: EmbeddedServer) -> None:
    wrong = server.url.replace("secret-token", "another")
    with pytest.raises(BusUnreachable, match=r"Authorization.*token"):
        await connect(wrong, "j", deadline_s=0.5)


async def test_a_server_without_jetstream_is_told_how_to_enable_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    plain = await asyncio.create_subprocess_exec(
        find_binary(), "-a", "127.0.0.1", "-p", str(port), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        with pytest.raises(NoJetStream, match="nats-server -js"):
            await connect(f"nats://127.0.0.1:{port}", "j", deadline_s=1.0)
    finally:
        plain.kill()
        await plain.wait()


async def test_a_taken_port_is_named(server: EmbeddedServer, tmp_path: Path) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(ServerFailed, match=rf"already in use.*port {port}"):
        await EmbeddedServer(tmp_path / "other", port=port).start()


async def test_a_missing_binary_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerFailed, match=r"trainmover\[local\]"):
        await EmbeddedServer(tmp_path).start()


async def test_the_server_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from trainmover.bus.server import EmbeddedServer\n"
        "async def main():\n"
        "    server = EmbeddedServer(Path(sys.argv[1]))\n"
        "    await server.start()\n"
        "    print(server.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(tmp_path / "bus"), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), 20))
    server = os.pidfd_open(pid)
    parent.kill()
    await parent.wait()
    ended = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().add_reader(server, ended.set_result, None)
    try:
        await asyncio.wait_for(ended, 5)
    finally:
        asyncio.get_running_loop().remove_reader(server)
        os.close(server)
