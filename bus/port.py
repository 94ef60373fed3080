"""What TrainMover needs of a message bus: a durable stream per job, and requests beside it.

Errors::

    BusError
    |-- BusUnreachable   nobody answers at the URL
    |-- BusClosed        this connection is over, for good
    |-- NoJetStream      a server without a durable store
    |-- Refused          the server has the message and will not store it
    |-- Conflict         another message came first on that subject
    |-- Missing          no object of that name is stored
    `-- Unanswered       a request got no answer in time

Two kinds of messages. *Stored* ones (`publish`, `follow`) reach every follower in one order, at
least once across restarts of everything; *told* ones (`tell`, `listen`, `request`, `respond`)
reach who listens now, at most once. Beside them *objects* (`put`, `get`), too large for messages.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

MSG_ID = "Nats-Msg-Id"
"""Header: a message with an id stored in the last `DUPLICATE_WINDOW_S` is not stored again."""
DUPLICATE_WINDOW_S = 120.0


class BusError(Exception):
    pass


class BusUnreachable(BusError):
    pass


class BusClosed(BusError):
    pass


class NoJetStream(BusError):
    pass


class Refused(BusError):
    pass


class Conflict(BusError):
    pass


class Missing(BusError):
    pass


class Unanswered(BusError):
    pass


@dataclass(frozen=True, slots=True)
class Message:
    subject: str
    payload: bytes
    headers: Mapping[str, str]
    seq: int = 0
    """Position in the stream, from 1; 0 for a told message."""
    time_s: float = 0.0
    """When the server stored it, seconds since 1970; 0 for a told message."""


Reply = tuple[bytes, Mapping[str, str]]
"""Payload and headers."""
Handler = Callable[[Message], Awaitable[None]]
Responder = Callable[[Message], Awaitable[Reply | None]]
"""None: no answer, the requester runs into its timeout."""


class Subscription(Protocol):
    async def unsubscribe(self) -> None: ...


class Bus(Protocol):
    """One connection, bound to one job's stream. All methods may raise BusClosed."""

    @property
    def up_since(self) -> float:
        """`time.monotonic()` of the last connect or reconnect, or end of the server's silence.

        Now, while the bus is away: nobody can be heard, which says nothing about them.
        """
        ...

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> int:
        """Store a message and return its seq; a duplicate returns the seq of the first.

        Waits while the bus is away, for ever: who needs a deadline cancels. There is no queue
        here, the caller that waits is the back-pressure. Raises Refused.
        """
        ...

    async def publish_expecting(
        self, subject: str, payload: bytes, headers: Mapping[str, str], last_subject_seq: int
    ) -> int:
        """Store only if the subject's last message has this seq (0: there is none).

        Raises Conflict when another one is there, and also for a duplicate id: whose message won
        is in the stream, and nowhere else (an acknowledgement of our own may have been lost).
        """
        ...

    def follow(self, after: int) -> AsyncGenerator[Message, None]:
        """Every stored message from seq `after` + 1 on, in order, each once, then live, for ever.

        Goes on across reconnects and restarts of the server; ends only by BusClosed or `aclose`.
        """
        ...

    async def last_seq(self) -> int:
        """Seq of the newest stored message, 0 when none is there. Waits while the bus is away."""
        ...

    async def put(self, name: str, data: bytes) -> None:
        """Store an object in place of what had that name. Waits like `publish`. Raises Refused."""
        ...

    async def get(self, name: str) -> bytes:
        """The newest object of that name, whole. Waits like `publish`. Raises Missing."""
        ...

    async def tell(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        """To whoever listens now. Does not block; dropped while the bus is away."""
        ...

    async def listen(self, subject: str, handler: Handler) -> Subscription:
        """Call `handler` for each told message, one after the other; `*` matches one token.

        What a handler raises is logged and the subscription goes on.
        """
        ...

    async def request(
        self, subject: str, payload: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> Message:
        """The first answer. Raises Unanswered after `timeout_s`, at once when nobody listens."""
        ...

    async def respond(self, subject: str, handler: Responder) -> Subscription:
        """Answer requests, several at the same time. What a handler raises is logged."""
        ...

    async def close(self) -> None:
        """End everything of this connection; more than once is no error."""
        ...
