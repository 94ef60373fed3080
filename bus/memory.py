"""The bus inside one process, with the semantics of the real one: for unit tests."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

import structlog

from trainmover.bus.port import (
    DUPLICATE_WINDOW_S,
    MSG_ID,
    BusClosed,
    Conflict,
    Handler,
    Message,
    Missing,
    Responder,
    Unanswered,
)

log = structlog.get_logger()


@dataclass(eq=False)
class _Listener:
    bus: "MemoryBus"
    pattern: list[str]
    queue: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    task: asyncio.Task[None] | None = None

    def hears(self, subject: str) -> bool:
        tokens = subject.split(".")
        return len(tokens) == len(self.pattern) and all(
            own in ("*", other) for own, other in zip(self.pattern, tokens, strict=True)
        )

    async def unsubscribe(self) -> None:
        self.bus.listeners.discard(self)
        if self.task is not None:
            self.task.cancel()


@dataclass(eq=False)
class _Responding:
    bus: "MemoryBus"
    subject: str
    handler: Responder

    async def unsubscribe(self) -> None:
        self.bus.responders.discard(self)


class MemoryBus:
    """Server and connection in one; several users may share it. Implements `port.Bus`."""

    def __init__(self) -> None:
        self.up_since = time.monotonic()
        self.stored: list[Message] = []
        self.objects: dict[str, bytes] = {}
        self.listeners: set[_Listener] = set()
        self.responders: set[_Responding] = set()
        self._closed = False
        self._changed = asyncio.Condition()

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> int:
        self._check_open()
        first = self._duplicate_of(headers)
        return await self._store(subject, payload, headers) if first is None else first

    async def publish_expecting(
        self, subject: str, payload: bytes, headers: Mapping[str, str], last_subject_seq: int
    ) -> int:
        self._check_open()
        if self._duplicate_of(headers) is not None:
            raise Conflict(f"{subject}: a message with this id is already stored")
        last = max((m.seq for m in self.stored if m.subject == subject), default=0)
        if last != last_subject_seq:
            raise Conflict(f"{subject}: expected {last_subject_seq} as the last seq, it is {last}")
        return await self._store(subject, payload, headers)

    def _check_open(self) -> None:
        if self._closed:
            raise BusClosed("this bus was closed")

    def _duplicate_of(self, headers: Mapping[str, str]) -> int | None:
        if MSG_ID not in headers:
            return None
        oldest = time.time() - DUPLICATE_WINDOW_S
        for message in reversed(self.stored):
            if message.time_s < oldest:
                return None
            if message.headers.get(MSG_ID) == headers[MSG_ID]:
                return message.seq
        return None

    async def _store(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> int:
        seq = len(self.stored) + 1
        self.stored.append(Message(subject, payload, dict(headers), seq, time.time()))
        async with self._changed:
            self._changed.notify_all()
        return seq

    async def follow(self, after: int) -> AsyncGenerator[Message, None]:
        while True:
            async with self._changed:
                while len(self.stored) <= after and not self._closed:
                    await self._changed.wait()
            self._check_open()
            yield self.stored[after]
            after += 1

    async def last_seq(self) -> int:
        self._check_open()
        return len(self.stored)

    async def put(self, name: str, data: bytes) -> None:
        self._check_open()
        self.objects[name] = data

    async def get(self, name: str) -> bytes:
        self._check_open()
        if name not in self.objects:
            raise Missing(f"no object {name!r} is stored")
        return self.objects[name]

    async def tell(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        self._check_open()
        for listener in self.listeners:
            if listener.hears(subject):
                listener.queue.put_nowait(Message(subject, payload, dict(headers)))

    async def listen(self, subject: str, handler: Handler) -> _Listener:
        self._check_open()
        listener = _Listener(self, subject.split("."))

        async def deliver() -> None:
            while True:
                message = await listener.queue.get()
                try:
                    await handler(message)
                except Exception:
                    log.exception("bus.handler_failed", subject=message.subject)

        listener.task = asyncio.create_task(deliver())
        self.listeners.add(listener)
        return listener

    async def request(
        self, subject: str, payload: bytes, headers: Mapping[str, str], timeout_s: float
    ) -> Message:
        self._check_open()
        message = Message(subject, payload, dict(headers))
        asked = [r.handler(message) for r in self.responders if r.subject == subject]
        if not asked:
            raise Unanswered(f"{subject}: nobody listens")
        try:
            async with asyncio.timeout(timeout_s):
                for answer in asyncio.as_completed(asked):
                    try:
                        reply = await answer
                    except Exception:
                        log.exception("bus.handler_failed", subject=subject)
                        continue
                    if reply is not None:
                        return Message(subject, reply[0], dict(reply[1]))
                await asyncio.Event().wait()
        except TimeoutError:
            pass
        raise Unanswered(f"{subject}: no answer within {timeout_s} s")

    async def respond(self, subject: str, handler: Responder) -> _Responding:
        self._check_open()
        responding = _Responding(self, subject, handler)
        self.responders.add(responding)
        return responding

    async def close(self) -> None:
        self._closed = True
        for listener in list(self.listeners):
            await listener.unsubscribe()
        self.responders.clear()
        async with self._changed:
            self._changed.notify_all()
