"""The contract for readers in other languages: `python -m trainmover.schemas.export`.

Writes schemas/generated/: a JSON Schema per event and command, an AsyncAPI 3.0 document, and a
sample of every event in CloudEvents 1.0's JSON format.
"""

import json
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from trainmover.schemas.base import Event
from trainmover.schemas.commands import Answer, AnyCommand, Command
from trainmover.schemas.envelope import MAC, seal
from trainmover.schemas.events import EVENTS, ONCE_ONLY
from trainmover.schemas.local import Telemetry
from trainmover.schemas.samples import SAMPLES, TIME_S

GENERATED = Path(__file__).resolve().parent / "generated"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
COMMANDS: dict[str, type[Command]] = {
    model.model_fields["kind"].default: model for model in get_args(AnyCommand)
}


def export() -> dict[str, str]:
    """Path below `generated` -> content."""
    documents: dict[str, Any] = {"asyncapi.json": _asyncapi()}
    for name, model in _messages().items():
        documents[f"{name}.v1.json"] = _schema(name, model)
    for event in SAMPLES:
        documents[f"cloudevents/{event.TYPE}.json"] = cloudevent(event)
    return {path: json.dumps(content, indent=2) + "\n" for path, content in documents.items()}


def cloudevent(event: Event) -> dict[str, Any]:
    """An event in CloudEvents' JSON format; on the bus the same stands in headers."""
    _, payload, headers = seal(event, source="sample", time_s=TIME_S, secret=b"")
    attributes = {k.removeprefix("ce-"): v for k, v in headers.items() if k.startswith("ce-")}
    if "traceparent" in headers:
        attributes["traceparent"] = headers["traceparent"]
    return {**attributes, "data": json.loads(payload)}


def _messages() -> dict[str, type[BaseModel]]:
    return {
        **EVENTS,
        **{f"command.{kind}": model for kind, model in COMMANDS.items()},
        "command.answer": Answer,
        "telemetry": Telemetry,
    }


def _schema(name: str, model: type[BaseModel]) -> dict[str, Any]:
    return {"$schema": DIALECT, "$id": f"{name}.v1.json", **model.model_json_schema()}


def _asyncapi() -> dict[str, Any]:
    parameter = {"description": "lower-case letters, digits and inner dashes, at most 63"}
    channels: dict[str, Any] = {
        name: {
            "address": f"trainmover.{{job}}.{name}.v1",
            "description": "Stored in the stream TRAINMOVER_<job>.",
            "parameters": {"job": parameter},
            "messages": {name: {"$ref": f"#/components/messages/{name}"}},
        }
        for name in EVENTS
    }
    channels["telemetry"] = {
        "address": "trainmover.{job}.telemetry.{machine}.v1",
        "description": "Not stored: one message per machine and interval.",
        "parameters": {"job": parameter, "machine": parameter},
        "messages": {"telemetry": {"$ref": "#/components/messages/telemetry"}},
    }
    commands = [f"command.{kind}" for kind in COMMANDS]
    channels["command"] = {
        "address": "trainmover.{job}.command.{worker}.v1",
        "description": "Not stored: a request to one worker, and its answer.",
        "parameters": {"job": parameter, "worker": parameter},
        "messages": {
            name: {"$ref": f"#/components/messages/{name}"}
            for name in (*commands, "command.answer")
        },
    }
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "TrainMover",
            "version": "1",
            "description": "Facts of a training job, and commands to its workers, over NATS.",
        },
        "defaultContentType": "application/json",
        "channels": channels,
        "operations": _operations(commands),
        "components": {
            "messages": {name: _message(name, model) for name, model in _messages().items()}
        },
    }


def _operations(commands: list[str]) -> dict[str, Any]:
    def follow(name: str) -> dict[str, Any]:
        return {"action": "receive", "channel": {"$ref": f"#/channels/{name}"}}

    def on_command(names: list[str]) -> list[dict[str, str]]:
        return [{"$ref": f"#/channels/command/messages/{name}"} for name in names]

    return {
        **{f"follow.{name}": follow(name) for name in (*EVENTS, "telemetry")},
        "command": {
            "action": "send",
            "channel": {"$ref": "#/channels/command"},
            "messages": on_command(commands),
            "reply": {
                "channel": {"$ref": "#/channels/command"},
                "messages": on_command(["command.answer"]),
            },
        },
    }


def _message(name: str, model: type[BaseModel]) -> dict[str, Any]:
    message: dict[str, Any] = {
        "name": name,
        "contentType": "application/json",
        "payload": {"$ref": f"./{name}.v1.json"},
    }
    headers = {MAC: "HMAC-SHA256 with the job's secret, hex"}
    if issubclass(model, Event):
        if model.__doc__:
            message["summary"] = model.__doc__.partition("\n")[0]
        message["x-once-only"] = name in ONCE_ONLY
        headers |= {
            "ce-id": "identity: the same when the fact is repeated",
            "ce-type": f"trainmover.{name}.v1",
            "ce-source": "/trainmover/<job>/<who says so>",
            "ce-time": "when it happened, RFC 3339",
            "traceparent": "W3C Trace Context of the incident, if there is one",
        }
    message["headers"] = {
        "type": "object",
        "properties": {k: {"type": "string", "description": v} for k, v in headers.items()},
    }
    return message


def main() -> None:
    """Write what `export` says and remove what it no longer says."""
    wanted = export()
    for path in GENERATED.rglob("*.json"):
        if str(path.relative_to(GENERATED)) not in wanted:
            path.unlink()
    for name, content in wanted.items():
        target = GENERATED / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)


if __name__ == "__main__":
    main()
