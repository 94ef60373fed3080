"""An event on the wire: JSON payload, CloudEvents 1.0 attributes in headers (binary mode), HMAC.

What does not fit raises `Rejected` with a reason to log; a service goes on.
"""

import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256

from pydantic import ValidationError

from trainmover.schemas import subjects, trace
from trainmover.schemas.base import Event
from trainmover.schemas.events import EVENTS

MAC = "Trainmover-Mac"
MAX_PAYLOAD_BYTES = 512 * 1024


class Rejected(ValueError):
    """A message that is not an acceptable event: what was expected, what came."""


def mac(secret: bytes, subject: str, payload: bytes) -> str:
    """HMAC-SHA256 over subject and payload, hex."""
    return hmac.new(secret, subject.encode() + b"\n" + payload, sha256).hexdigest()


def verify(secret: bytes, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
    """Raises Rejected unless the message carries the job secret's MAC. No secret: accepts all."""
    given = headers.get(MAC, "").encode()  # text is compared only where it is ASCII
    if secret and not hmac.compare_digest(mac(secret, subject, payload).encode(), given):
        raise Rejected(f"{subject}: expected a {MAC} header made with the job secret")


def seal(
    event: Event, *, source: str, time_s: float, secret: bytes
) -> tuple[str, bytes, dict[str, str]]:
    """Subject, payload and headers of an event. `time_s` is when it happened (since 1970)."""
    subject = subjects.event(event.job, event)
    payload = event.model_dump_json().encode()
    headers = {
        "ce-specversion": "1.0",
        "ce-id": event.identity(),
        "ce-type": f"trainmover.{event.TYPE}.v{event.VERSION}",
        "ce-source": f"/trainmover/{event.job}/{source}",
        "ce-time": datetime.fromtimestamp(time_s, UTC).isoformat(),
        "ce-datacontenttype": "application/json",
        "Nats-Msg-Id": event.identity(),
    }
    incident = getattr(event, "incident", None)
    if incident:
        headers["traceparent"] = trace.traceparent(event.run, incident)
    if secret:
        headers[MAC] = mac(secret, subject, payload)
    return subject, payload, headers


def open_event(
    subject: str, payload: bytes, headers: Mapping[str, str], *, job: str, secret: bytes
) -> Event:
    """The event inside a message of `job`. Raises Rejected."""
    parts = subject.split(".")
    if len(parts) != 5 or parts[0] != "trainmover":
        raise Rejected(f"expected trainmover.<job>.<noun>.<verb>.v<N>, came {subject}")
    _, subject_job, noun, verb, version = parts
    if subject_job != job:
        raise Rejected(f"{subject}: an event of job {subject_job}, this is job {job}")
    model = EVENTS.get(f"{noun}.{verb}")
    if model is None or version != f"v{model.VERSION}":
        known = "an unknown type" if model is None else f"version v{model.VERSION} is known"
        raise Rejected(f"{subject}: {known}; upgrade the reader")
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise Rejected(f"{subject}: {len(payload)} bytes, at most {MAX_PAYLOAD_BYTES} are accepted")
    verify(secret, subject, payload, headers)
    event = _validate(model, subject, payload)
    if event.job != job:
        raise Rejected(f"{subject}: the payload names job {event.job}, this is job {job}")
    return event


def _validate(model: type[Event], subject: str, payload: bytes) -> Event:
    try:
        return model.model_validate_json(payload)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "payload"
        raise Rejected(f"{subject}: {where}: {first['msg']}") from error
