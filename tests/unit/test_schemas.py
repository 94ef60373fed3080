"""What is generated from the contract is what is committed; every event survives the wire."""

import json

import pytest

from trainmover.schemas import export
from trainmover.schemas.base import Event
from trainmover.schemas.envelope import open_event, seal
from trainmover.schemas.events import EVENTS
from trainmover.schemas.samples import SAMPLES


def test_the_generated_files_are_those_of_the_models() -> None:
    committed = {
        str(path.relative_to(export.GENERATED)): path.read_text()
        for path in export.GENERATED.rglob("*.json")
    }
    wanted = export.export()
    assert sorted(committed) == sorted(wanted), "run: python -m trainmover.schemas.export"
    stale = [path for path, content in wanted.items() if committed[path] != content]
    assert not stale, "run: python -m trainmover.schemas.export"


def test_there_is_a_sample_of_every_event() -> None:
    assert sorted(sample.TYPE for sample in SAMPLES) == sorted(EVENTS)


def test_every_reference_of_the_asyncapi_document_resolves() -> None:
    files = export.export()
    document = json.loads(files["asyncapi.json"])

    def check(value: object) -> None:
        if isinstance(value, dict):
            if reference := value.get("$ref"):
                resolve(reference)
            for child in value.values():
                check(child)
        elif isinstance(value, list):
            for child in value:
                check(child)

    def resolve(reference: str) -> None:
        if reference.startswith("./"):
            assert reference.removeprefix("./") in files
            return
        at = document
        for part in reference.removeprefix("#/").split("/"):
            at = at[part]

    check(document)


@pytest.mark.parametrize("event", SAMPLES, ids=lambda event: event.TYPE)
def test_an_event_comes_out_of_its_envelope_as_it_went_in(event: Event) -> None:
    subject, payload, headers = seal(event, source="x", time_s=0, secret=b"s")
    assert open_event(subject, payload, headers, job=event.job, secret=b"s") == event
    assert all(value.isascii() for value in headers.values())


@pytest.mark.parametrize("event", SAMPLES, ids=lambda event: event.TYPE)
def test_a_sample_has_what_cloudevents_requires(event: Event) -> None:
    sample = export.cloudevent(event)
    assert sample["specversion"] == "1.0"
    assert all(sample[name] for name in ("id", "type", "source", "time"))
    assert all(name.isalnum() and name.islower() for name in sample)
