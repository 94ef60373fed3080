"""The bus as one job sees it: typed events, commands and telemetry, signed with its secret.

What is not acceptable (unsigned, malformed, of another job, run or version) is logged and
skipped; a service goes on.
"""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime

import structlog
from pydantic import ValidationError

from trainmover.bus.port import Bus, Conflict, Message, Missing, Reply, Unanswered
from trainmover.schemas import subjects
from trainmover.schemas.base import Event
from trainmover.schemas.commands import COMMAND, Answer, AnyCommand
from trainmover.schemas.envelope import MAC, Rejected, mac, open_event, seal, verify
from trainmover.schemas.local import Telemetry
from trainmover.schemas.recorded import Recorded

log = structlog.get_logger()

MAC_CHARS = 64
"""Of the signature in front of an object."""
RUN = "Trainmover-Run"
"""Header of a command: the run it is for."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A stored message that is no acceptable event of this run; it still has a place."""

    seq: int
    subject: str


class JobBus:
    """One participant of one run. `source` names it in envelopes, as `detector`, `agent/m1`."""

    def __init__(self, bus: Bus, *, job: str, run: str, source: str, secret: bytes) -> None:
        """An empty `secret` signs nothing and accepts all."""
        self.job = job
        self.run = run
        self._bus = bus
        self._source = source
        self._secret = secret

    @property
    def up_since(self) -> float:
        """As `port.Bus.up_since`: silence of others counts from here at most."""
        return self._bus.up_since

    # ---- events

    async def publish(self, event: Event, *, time_s: float | None = None) -> int:
        """Store an event, waiting while the bus is away; its seq. Raises Refused, BusClosed.

        `time_s`: when it happened, seconds since 1970; None: now.
        """
        return await self._bus.publish(*self._seal(event, time_s))

    async def publish_once(self, event: Event, *, last_subject_seq: int) -> bool:
        """Store a decision if its subject's last message has that seq (0: none).

        False: another copy came first (or an earlier try of ours); the stream says whose.
        Waits while the bus is away. Raises Refused, BusClosed.
        """
        try:
            await self._bus.publish_expecting(*self._seal(event, None), last_subject_seq)
        except Conflict as conflict:
            log.info("bus.decision_lost", type=event.TYPE, reason=str(conflict))
            return False
        return True

    def _seal(self, event: Event, time_s: float | None) -> tuple[str, bytes, dict[str, str]]:
        if (event.job, event.run) != (self.job, self.run):
            raise ValueError(
                f"expected an event of run {self.run} of job {self.job}, came {event.TYPE} of run"
                f" {event.run} of job {event.job}"
            )
        occurred = time.time() if time_s is None else time_s
        return seal(event, source=self._source, time_s=occurred, secret=self._secret)

    async def read(self, after: int = 0) -> AsyncGenerator[Recorded | Skipped, None]:
        """As `follow`, with the places of what was skipped: for who counts seqs."""
        async with aclosing(self._bus.follow(after)) as messages:
            async for message in messages:
                yield self._open(message)

    async def follow(self, after: int = 0) -> AsyncGenerator[Recorded, None]:
        """Every event of this run behind seq `after`, in stream order, each once, for ever."""
        async with aclosing(self.read(after)) as items:
            async for item in items:
                if isinstance(item, Recorded):
                    yield item

    def _open(self, message: Message) -> Recorded | Skipped:
        try:
            event = open_event(
                message.subject, message.payload, message.headers, job=self.job, secret=self._secret
            )
            if event.run != self.run:
                raise Rejected(f"{message.subject}: of run {event.run}, this is run {self.run}")
        except Rejected as why:
            log.warning("bus.message_rejected", seq=message.seq, reason=str(why))
            return Skipped(message.seq, message.subject)
        return Recorded(message.seq, message.time_s, event, _occurred(message.headers))

    async def last_seq(self) -> int:
        """Seq of the newest stored message of any kind, 0 when there is none."""
        return await self._bus.last_seq()

    # ---- objects

    async def put(self, name: str, data: bytes) -> None:
        """Store an object, signed, waiting while the bus is away. Raises Refused, BusClosed."""
        await self._bus.put(name, mac(self._secret, _object(name), data).encode() + data)

    async def get(self, name: str) -> bytes:
        """What was last put there by someone who knows the secret. Raises Missing, BusClosed."""
        stored = await self._bus.get(name)
        signature, data = stored[:MAC_CHARS], stored[MAC_CHARS:]
        try:
            verify(self._secret, _object(name), data, {MAC: signature.decode("latin-1")})
        except Rejected as why:
            log.warning("bus.object_rejected", name=name, reason=str(why))
            raise Missing(f"object {name!r} is not of this run: {why}") from why
        return data

    # ---- commands

    async def ask(self, worker: str, command: AnyCommand, *, timeout_s: float) -> Answer:
        """A worker's answer to a command. Raises Unanswered, also for one that is not its own."""
        subject = subjects.command(self.job, worker)
        payload = command.model_dump_json().encode()
        headers = {RUN: self.run, **self._signed(subject, payload)}
        reply = await self._bus.request(subject, payload, headers, timeout_s)
        try:
            verify(self._secret, subject, payload + b"\n" + reply.payload, reply.headers)
            return Answer.model_validate_json(reply.payload)
        except (Rejected, ValidationError) as why:
            log.warning("bus.answer_rejected", worker=worker, reason=str(why))
            raise Unanswered(f"{subject}: the answer is not acceptable: {why}") from why

    async def answer(self, worker: str, handler: Callable[[AnyCommand], Awaitable[Answer]]) -> None:
        """Hand each acceptable command for `worker` to `handler` and send back what it returns.

        Several may run at the same time. Nothing is sent for a command that is not acceptable.
        """

        async def respond(message: Message) -> Reply | None:
            try:
                verify(self._secret, message.subject, message.payload, message.headers)
                if message.headers.get(RUN) != self.run:
                    raise Rejected(f"expected run {self.run}, came {message.headers.get(RUN)}")
                command = COMMAND.validate_json(message.payload)
            except (Rejected, ValidationError) as why:
                log.warning("bus.command_rejected", worker=worker, reason=str(why))
                return None
            payload = (await handler(command)).model_dump_json().encode()
            return payload, self._signed(message.subject, message.payload + b"\n" + payload)

        subject = subjects.command(self.job, worker)
        await self._bus.respond(subject, respond)

    def _signed(self, subject: str, payload: bytes) -> dict[str, str]:
        """An answer is signed together with what it answers: neither fits anything else."""
        return {MAC: mac(self._secret, subject, payload)} if self._secret else {}

    # ---- telemetry

    async def telemetry(self, telemetry: Telemetry) -> None:
        """Tell who listens now; dropped while the bus is away."""
        subject = subjects.telemetry(self.job, telemetry.machine)
        payload = telemetry.model_dump_json().encode()
        await self._bus.tell(subject, payload, self._signed(subject, payload))

    async def on_telemetry(self, handler: Callable[[Telemetry], Awaitable[None]]) -> None:
        """Call `handler` for what every machine of this run tells, one after the other."""

        async def hear(message: Message) -> None:
            try:
                verify(self._secret, message.subject, message.payload, message.headers)
                telemetry = Telemetry.model_validate_json(message.payload)
                if (telemetry.job, telemetry.run) != (self.job, self.run):
                    raise Rejected(f"of run {telemetry.run}, this is run {self.run}")
            except (Rejected, ValidationError) as why:
                log.warning("bus.telemetry_rejected", subject=message.subject, reason=str(why))
                return
            await handler(telemetry)

        await self._bus.listen(subjects.telemetry(self.job), hear)

    async def close(self) -> None:
        """Close the bus below; more than once is no error."""
        await self._bus.close()


def _object(name: str) -> str:
    """What is signed with an object, as the subject with a message."""
    return f"object {name}"


def _occurred(headers: Mapping[str, str]) -> float:
    try:
        return datetime.fromisoformat(headers["ce-time"]).timestamp()
    except (KeyError, ValueError):
        return 0.0
