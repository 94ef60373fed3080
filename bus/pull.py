"""One reading of a stream: a pull consumer that is thrown away at the first doubt.

The consumer lives in the server's memory and acknowledges nothing; the reader knows its place
itself and declares another consumer behind it after a reconnect, a gap or silence (the idea of
NATS' ordered consumer, pulled instead of pushed so that what waits here is bounded).
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from trainmover.bus.port import Message

BATCH = 256
HEARTBEAT_S = 0.5
SILENCE_S = 5 * HEARTBEAT_S
EXPIRES_S = 30.0
_BATCH_ENDED = ("404", "408")
"""Status of a pull request that ran out: no message, or expired."""

_PULL = json.dumps(
    {
        "batch": BATCH,
        "expires": int(EXPIRES_S * 1e9),
        "idle_heartbeat": int(HEARTBEAT_S * 1e9),
    }
).encode()


class Inbox(asyncio.Queue[Msg | None]):
    """What the server delivers; None: the connection was renewed or closed."""

    __hash__ = object.__hash__

    def __init__(self, hear: Callable[[], None]) -> None:
        """`hear` is called for whatever comes from the server."""
        super().__init__()
        self._hear = hear

    async def deliver(self, msg: Msg) -> None:
        self._hear()
        await self.put(msg)


async def pull(
    client: Client, stream: str, after: int, inbox: Inbox
) -> AsyncGenerator[Message, None]:
    """Messages from seq `after` + 1 on, until this consumer can no longer be trusted.

    Raises what nats-py raises when the consumer cannot be declared.
    """
    subject = client.new_inbox()
    subscription = await client.subscribe(subject, cb=inbox.deliver)
    try:
        name = subject.rpartition(".")[2]
        await client.jetstream(timeout=0.5).add_consumer(
            stream,
            ConsumerConfig(
                name=name,
                deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=after + 1,
                ack_policy=AckPolicy.NONE,
                mem_storage=True,
                num_replicas=1,
                inactive_threshold=2 * EXPIRES_S,
            ),
        )
        request = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{name}"
        delivered, wanted = 0, 0
        while True:
            if wanted == 0:
                await client.publish(request, _PULL, reply=subject)
                wanted = BATCH
            try:
                # Not wait_for: in Python 3.11 it loses a cancellation that comes with a message.
                async with asyncio.timeout(SILENCE_S):
                    msg = await inbox.get()
            except TimeoutError:
                return
            status = (msg.headers or {}).get("Status") if msg else "renewed"
            if status == "100":  # heartbeat
                continue
            if status in _BATCH_ENDED:
                wanted = 0
                continue
            if msg is None or status:
                return
            metadata = msg.metadata
            if metadata.sequence.consumer != delivered + 1:
                return
            delivered, wanted = delivered + 1, wanted - 1
            yield Message(
                msg.subject,
                msg.data,
                msg.headers or {},
                metadata.sequence.stream,
                metadata.timestamp.timestamp(),
            )
    finally:
        with suppress(nats.errors.Error):
            await subscription.unsubscribe()
