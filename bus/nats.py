"""The bus over a NATS server with JetStream.

Timings: reconnects are unlimited, 50 ms growing to 2 s (nats-py gives up after 60), pings every
2 s, and JetStream requests are repeated after 500 ms (with the defaults a restart of the server
costs 5 s).
"""

import asyncio
import io
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import nats.errors
import structlog
import tenacity
from nats.aio.client import Client, Server
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.api import (
    DiscardPolicy,
    ObjectMeta,
    ObjectMetaOptions,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.errors import (
    APIError,
    BadObjectMetaError,
    DigestMismatchError,
    NoStreamResponseError,
    NotFoundError,
)
from nats.js.errors import ServiceUnavailableError as JetStreamUnavailable
from nats.js.object_store import ObjectStore

from trainmover.bus.port import (
    DUPLICATE_WINDOW_S,
    BusClosed,
    BusUnreachable,
    Conflict,
    Handler,
    Message,
    Missing,
    NoJetStream,
    Refused,
    Responder,
    Unanswered,
)
from trainmover.bus.pull import HEARTBEAT_S, Inbox, pull
from trainmover.schemas import subjects

log = structlog.get_logger()
T = TypeVar("T")

FIRST_WAIT_S, LONGEST_WAIT_S = 0.05, 2.0
PING_S = 2
REQUEST_S = 0.5
CHUNK_BYTES, CHUNK_S = 512 * 1024, 5.0
"""Of an object: each one is acknowledged, and written through before."""
QUIET_S = 2 * HEARTBEAT_S
"""Who follows and hears nothing at all for so long has no bus, whatever its connection says."""

_TEMPORARY = (
    nats.errors.TimeoutError,
    nats.errors.NoRespondersError,
    nats.errors.OutboundBufferLimitError,
    JetStreamUnavailable,
    NoStreamResponseError,  # also while a restarted server still reads its store
)
_WRONG_LAST_SEQUENCE = (10071, 10164)
"""JetStream's error codes for a failed `Nats-Expected-Last-Subject-Sequence`."""


async def connect(url: str, job: str, *, deadline_s: float, replicas: int = 1) -> "NatsBus":
    """Connect and make the job's stream if it is missing; of `replicas` servers in a cluster.

    Raises BusUnreachable or NoJetStream after `deadline_s`.
    """
    bus = NatsBus(url, job)
    try:
        async with asyncio.timeout(deadline_s):
            await bus.open(replicas)
    except TimeoutError as error:
        failure = bus.why_not_open(deadline_s)
        await bus.close()
        raise failure from error
    except BaseException:
        await bus.close()
        raise
    return bus


class NatsBus:
    """Implements `port.Bus`; made by `connect`."""

    def __init__(self, url: str, job: str) -> None:
        self._up_since = self._heard = time.monotonic()
        self._url = url
        self._stream = subjects.stream(job)
        self._subjects = subjects.stored(job)
        self._bucket = subjects.objects(job)
        self._client = Client()
        self._js: JetStreamContext = self._client.jetstream(timeout=REQUEST_S)
        self._up = asyncio.Event()
        """Connected, or closed for good: nothing to wait for."""
        self._closed = False
        self._last_error = "no answer"
        self._inboxes: set[Inbox] = set()
        self._answering: set[asyncio.Task[None]] = set()
        self._asking: set[asyncio.Timeout] = set()
        """Of requests under way."""

    async def open(self, replicas: int) -> None:
        await self._client.connect(
            self._url,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_connected,
            closed_cb=self._on_closed,
            max_reconnect_attempts=-1,
            reconnect_time_wait=FIRST_WAIT_S,  # type: ignore[arg-type]  # any number of seconds
            reconnect_to_server_handler=_next_server,
            connect_timeout=2,
            ping_interval=PING_S,
        )
        await self._on_connected()
        await self._retrying(lambda: self._ensure_stream(replicas))

    def why_not_open(self, deadline_s: float) -> BusUnreachable | NoJetStream:
        where = without_secrets(self._url)
        if self._client.is_connected:
            return NoJetStream(
                f"{where} is a NATS server, but JetStream did not answer within {deadline_s:g} s"
                f" ({self._last_error}): start it with `nats-server -js`, or put `jetstream {{}}`"
                " into its configuration and enable it for the account"
            )
        return BusUnreachable(
            f"no NATS server answered at {where} within {deadline_s:g} s ({self._last_error}):"
            " check that it runs, the address, the token, and that no firewall is between"
        )

    async def _ensure_stream(self, replicas: int) -> None:
        try:
            await self._js.stream_info(self._stream)
        except NotFoundError:
            await self._js.add_stream(
                StreamConfig(
                    name=self._stream,
                    subjects=self._subjects,
                    storage=StorageType.FILE,
                    retention=RetentionPolicy.LIMITS,
                    discard=DiscardPolicy.NEW,
                    max_age=0,
                    duplicate_window=DUPLICATE_WINDOW_S,
                    num_replicas=replicas,
                )
            )

    # ---- the connection

    @property
    def up_since(self) -> float:
        now = time.monotonic()
        away = not self._up.is_set() or now - self._heard >= QUIET_S
        return now if away else self._up_since

    def _hear(self) -> None:
        """The server has sent something to a follower, a heartbeat at least."""
        now = time.monotonic()
        if now - self._heard >= QUIET_S:  # it hung, or we did: the same as an outage
            self._up_since = now
        self._heard = now

    async def _on_connected(self) -> None:
        self._up_since = self._heard = time.monotonic()
        self._up.set()
        self._wake_followers()

    async def _on_disconnected(self) -> None:
        if not self._closed:
            self._up.clear()
            log.warning("bus.disconnected", url=without_secrets(self._url))
        for deadline in self._asking:  # an answer would not find its way back
            deadline.reschedule(0)

    async def _on_closed(self) -> None:
        if not self._closed:
            log.error("bus.closed", url=without_secrets(self._url), error=self._last_error)
        self._closed = True
        self._up.set()
        self._wake_followers()

    async def _on_error(self, error: Exception) -> None:
        if not isinstance(error, ConnectionResetError):  # what the server said before tells more
            self._last_error = str(error) or type(error).__name__
        log.debug("bus.error", error=str(error))

    def _wake_followers(self) -> None:
        for inbox in self._inboxes:
            inbox.put_nowait(None)

    async def _connected(self) -> None:
        """Waits until the server is there. Raises BusClosed."""
        await self._up.wait()
        if self._closed:
            raise BusClosed(f"the connection to {without_secrets(self._url)} is closed")

    async def _retrying(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat `call` until it succeeds or fails for good."""

        async def attempt() -> T:
            await self._connected()
            try:
                return await call()
            except nats.errors.ConnectionClosedError as error:
                raise BusClosed(str(error)) from error

        return await tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(_TEMPORARY),
            wait=tenacity.wait_exponential(FIRST_WAIT_S, LONGEST_WAIT_S),
            before_sleep=self._note_failed_attempt,
        )(attempt)

    def _note_failed_attempt(self, state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        self._last_error = str(error) or type(error).__name__
        if state.attempt_number % 15 == 0:  # the 15th is 30 s old, then one line every 30 s
            log.warning("bus.still_retrying", waited_s=state.seconds_since_start, error=str(error))

    # ---- stored messages

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> int:
        return (await self._store(subject, payload, headers))[0]

    async def publish_expecting(
        self, subject: str, payload: bytes, headers: Mapping[str, str], last_subject_seq: int
    ) -> int:
        expected = {"Nats-Expected-Last-Subject-Sequence": str(last_subject_seq)}
        seq, duplicate = await self._store(subject, payload, {**headers, **expected})
        if duplicate:
            raise Conflict(f"{subject}: a message with this id is already stored, seq {seq}")
        return seq

    async def _store(
        self, subject: str, payload: bytes, headers: Mapping[str, str]
    ) -> tuple[int, bool]:
        try:
            ack = await self._retrying(
                lambda: self._js.publish(
                    subject, payload, stream=self._stream, headers=dict(headers)
                )
            )
        except APIError as error:
            if error.err_code in _WRONG_LAST_SEQUENCE:
                raise Conflict(f"{subject}: {error.description}") from error
            raise Refused(f"{subject}: {error.description}") from error
        except nats.errors.MaxPayloadError as error:
            raise Refused(f"{subject}: {len(payload)} bytes are over the server's limit") from error
        return ack.seq, bool(ack.duplicate)

    async def follow(self, after: int) -> AsyncGenerator[Message, None]:
        waits = 0
        while True:
            await self._connected()
            inbox = Inbox(self._hear)
            self._inboxes.add(inbox)
            try:
                async with aclosing(pull(self._client, self._stream, after, inbox)) as messages:
                    async for message in messages:
                        after, waits = message.seq, 0
                        yield message
            except (*_TEMPORARY, APIError, nats.errors.ConnectionClosedError) as error:
                await self._on_error(error)
                await asyncio.sleep(min(FIRST_WAIT_S * 2**waits, LONGEST_WAIT_S))
                waits = min(waits + 1, 6)
            finally:
                self._inboxes.discard(inbox)

    async def last_seq(self) -> int:
        info = await self._retrying(lambda: self._js.stream_info(self._stream))
        return info.state.last_seq if info.state.messages else 0

    # ---- objects

    async def put(self, name: str, data: bytes) -> None:
        try:
            await self._retrying(lambda: self._put(name, data))
        except APIError as error:
            raise Refused(f"object {name!r}: {error.description}") from error

    async def _put(self, name: str, data: bytes) -> None:
        chunk_bytes = min(CHUNK_BYTES, self._client.max_payload)
        options = ObjectMetaOptions(max_chunk_size=chunk_bytes)
        await (await self._objects()).put(name, data, ObjectMeta(options=options))

    async def get(self, name: str) -> bytes:
        try:
            return await self._retrying(lambda: self._get(name))
        except NotFoundError as error:
            raise Missing(f"no object {name!r} is stored") from error
        except (BadObjectMetaError, DigestMismatchError) as error:
            raise Missing(f"object {name!r} was replaced while it was read: {error!r}") from error

    async def _get(self, name: str) -> bytes:
        found = io.BytesIO()
        await (await self._objects()).get(name, found)
        return found.getvalue()

    async def _objects(self) -> ObjectStore:
        """The job's bucket, made when it is first needed, on as many servers as the stream."""
        js = self._client.jetstream(timeout=CHUNK_S)
        try:
            return await js.object_store(self._bucket)
        except NotFoundError:
            config = (await js.stream_info(self._stream)).config
            return await js.create_object_store(self._bucket, replicas=config.num_replicas or 1)

    # ---- told messages

    async def tell(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        if self._client.is_connected:  # nats-py would keep it and send it late
            await self._client.publish(subject, payload, headers=dict(headers))

    async def listen(self, subject: str, handler: Handler) -> Subscription:
        async def deliver(msg: Msg) -> None:
            try:
                await handler(_message(msg))
            except Exception:
                log.exception("bus.handler_failed", subject=msg.subject)

        return await self._subscribe(subject, deliver)

    async def request(
        self, subject: str, payload: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> Message:
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                await self._connected()
                self._asking.add(deadline)
                try:
                    msg = await self._client.request(
                        subject, payload, timeout=timeout_s, headers=dict(headers)
                    )
                finally:
                    self._asking.discard(deadline)
        except nats.errors.NoRespondersError as error:
            raise Unanswered(f"{subject}: nobody listens") from error
        except TimeoutError as error:  # nats-py's is one of these
            why = f"no answer within {timeout_s:g} s, or the connection broke"
            raise Unanswered(f"{subject}: {why}") from error
        except nats.errors.ConnectionClosedError as error:
            raise BusClosed(str(error)) from error
        return _message(msg)

    async def respond(self, subject: str, handler: Responder) -> Subscription:
        async def answer(msg: Msg) -> None:
            try:
                reply = await handler(_message(msg))
                if reply is not None:
                    await self._client.publish(msg.reply, reply[0], headers=dict(reply[1]))
            except Exception:
                log.exception("bus.handler_failed", subject=msg.subject)

        async def deliver(msg: Msg) -> None:
            # nats-py delivers one after the other: a slow answer must not hold up the next.
            task = asyncio.create_task(answer(msg))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

        return await self._subscribe(subject, deliver)

    async def _subscribe(
        self, subject: str, deliver: Callable[[Msg], Awaitable[None]]
    ) -> Subscription:
        await self._connected()
        subscription = await self._client.subscribe(subject, cb=deliver)
        with suppress(nats.errors.Error):  # a connection lost here renews it when it comes back
            await self._client.flush()  # from here on the server knows it
        return subscription

    async def close(self) -> None:
        self._closed = True
        self._up.set()
        self._wake_followers()
        for task in list(self._answering):
            task.cancel()
        await self._client.close()


def _next_server(servers: list[Server], _info: dict[str, Any]) -> tuple[Server, float]:
    """The server that failed least, and how long to wait before trying it."""
    server = min(servers, key=lambda s: s.reconnects)
    return server, min(FIRST_WAIT_S * 2 ** min(server.reconnects, 6), LONGEST_WAIT_S)


def _message(msg: Msg) -> Message:
    return Message(msg.subject, msg.data, msg.headers or {})


def without_secrets(url: str) -> str:
    """The URL as it may be shown: no token, no password."""
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
