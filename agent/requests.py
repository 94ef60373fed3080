"""What a person may ask of a machine's agent over the bus: core NATS requests, signed both ways."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

import structlog
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    TypeAdapter,
    ValidationError,
)

from trainmover.bus.port import Bus, Message, Reply, Subscription
from trainmover.schemas import subjects
from trainmover.schemas.envelope import MAC, Rejected, mac, verify
from trainmover.schemas.names import Name

ANSWER_WITHIN_S = 5.0

log = structlog.get_logger(__name__)


class Kill(BaseModel):
    """Say fault.injected, then kill the worker."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["kill"] = "kill"
    run: Name
    worker: Name
    rank: NonNegativeInt | None = None


class Live(BaseModel):
    """Say that this machine has an agent."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["live"] = "live"


Request = Kill | Live
_REQUEST: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])


class Done(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    refused: str = ""
    """Why it was not done; empty when it was."""


async def answer(
    bus: Bus,
    handler: Callable[[Kill], Awaitable[Done]],
    *,
    job: str,
    machine: str,
    secret: bytes,
) -> Subscription:
    """Answer requests to this machine's agent; what is not signed by the job is logged only."""

    async def respond(message: Message) -> Reply | None:
        try:
            verify(secret, message.subject, message.payload, message.headers)
            request = _REQUEST.validate_json(message.payload)
        except (Rejected, ValidationError) as error:
            log.warning("a request is refused", error=str(error))
            return None
        done = await handler(request) if isinstance(request, Kill) else Done()
        reply = done.model_dump_json().encode()
        return reply, {MAC: mac(secret, message.subject, message.payload + reply)}

    return await bus.respond(subjects.agent(job, machine), respond)


async def ask(bus: Bus, request: Request, *, job: str, machine: str, secret: bytes) -> Done:
    """Raises bus.port.Unanswered, and Rejected when the answer is not the agent's."""
    subject = subjects.agent(job, machine)
    payload = request.model_dump_json().encode()
    headers = {MAC: mac(secret, subject, payload)}
    reply = await bus.request(subject, payload, headers, ANSWER_WITHIN_S)
    if secret and reply.headers.get(MAC) != mac(secret, subject, payload + reply.payload):
        raise Rejected(f"{subject}: the answer is not signed with the job secret")
    return Done.model_validate_json(reply.payload)
