"""A reading of a stream ends at the first doubt, so that the next one starts behind it."""

import asyncio
from typing import Any, cast

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from trainmover.bus.pull import Inbox, pull


class FakeClient:
    """Takes what a reading says to the server; what the server says is put into the inbox."""

    def __init__(self) -> None:
        self.pulls = 0
        self.starts: list[int] = []

    def new_inbox(self) -> str:
        return "_INBOX.x"

    async def subscribe(self, _subject: str, **_: Any) -> "FakeClient":
        return self

    async def unsubscribe(self) -> None: ...

    def jetstream(self, **_: Any) -> "FakeClient":
        return self

    async def add_consumer(self, _stream: str, config: Any) -> None:
        self.starts.append(config.opt_start_seq)

    async def publish(self, _subject: str, _payload: bytes, **_: Any) -> None:
        self.pulls += 1


def delivered(stream_seq: int, consumer_seq: int) -> Msg:
    reply = f"$JS.ACK.S.C.1.{stream_seq}.{consumer_seq}.1750000000000000000.0"
    return Msg(_client=cast(Client, None), subject="s", reply=reply, data=b"")


def status(code: str) -> Msg:
    return Msg(_client=cast(Client, None), subject="s", headers={"Status": code})


async def read(*inbox: Msg | None, client: FakeClient | None = None) -> list[int]:
    """Seqs that a reading behind seq 6 yields before it ends."""
    arrived = Inbox(hear=lambda: None)
    for message in inbox:
        arrived.put_nowait(message)
    async with asyncio.timeout(1):
        messages = pull(cast(Client, client or FakeClient()), "S", 6, arrived)
        return [message.seq async for message in messages]


async def test_a_gap_in_the_deliveries_ends_the_reading_before_it() -> None:
    assert await read(delivered(7, 1), delivered(8, 2), delivered(10, 4), None) == [7, 8]


async def test_messages_of_another_life_of_the_connection_are_not_read() -> None:
    assert await read(delivered(7, 1), None, delivered(8, 2)) == [7]


async def test_a_gap_in_the_stream_itself_is_no_doubt() -> None:
    assert await read(delivered(7, 1), delivered(9, 2), None) == [7, 9]


@pytest.mark.parametrize("code", ["409", "503"])
async def test_a_consumer_that_is_gone_ends_the_reading(code: str) -> None:
    assert await read(delivered(7, 1), status(code), delivered(8, 2)) == [7]


async def test_a_request_that_ran_out_is_renewed_and_a_heartbeat_is_not_a_message() -> None:
    client = FakeClient()
    inbox = (status("100"), status("408"), delivered(7, 1), status("404"), delivered(8, 2), None)
    assert await read(*inbox, client=client) == [7, 8]
    assert (client.starts, client.pulls) == ([7], 3)


async def test_silence_without_heartbeats_ends_the_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainmover.bus.pull.SILENCE_S", 0.01)
    assert await read(delivered(7, 1)) == [7]
