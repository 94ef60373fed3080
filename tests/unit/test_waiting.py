"""What a person hears while a job has not begun."""

import pytest

from trainmover.agent.tracebacks import last_line
from trainmover.cli.waiting import waited_for
from trainmover.schemas.base import Event
from trainmover.schemas.events import (
    JobFailed,
    JobSubmitted,
    LayoutAssigned,
    WorkerRegistered,
    WorkerStarted,
)
from trainmover.schemas.layout import Layout

SUBMITTED = JobSubmitted(
    job="j",
    run="r",
    layout=Layout.parse("dp=4"),
    workers_per_machine=2,
    num_standbys=0,
    script_digest="d",
    host="h",
)
BUS = "nats://h:4222"


def here(*machines: str) -> list[Event]:
    return [
        WorkerStarted(job="j", run="r", worker=f"{m}-w0", machine=m, local_index=0, pid=7)
        for m in machines
    ]


def registered(count: int) -> list[Event]:
    return [
        WorkerRegistered(
            job="j", run="r", worker=f"m-w{n}", machine="m", local_index=n, addresses=()
        )
        for n in range(count)
    ]


@pytest.mark.parametrize(
    ("events", "line"),
    [
        (here(), "no worker has started yet"),
        (here("m1"), "machine 1 of 2 is here; waiting for the other"),
        (here("m1", "m2"), "0 of 4 workers have registered"),
        ([*here("m1", "m2"), *registered(3)], "3 of 4 workers have registered"),
        (
            [*here("m1", "m2"), *registered(4)],
            "is `trainmover services --job j --bus nats://h:4222` running?",
        ),
    ],
)
def test_a_person_hears_who_is_missing(events: list[Event], line: str) -> None:
    assert line in (waited_for([SUBMITTED, *events], BUS) or "")


@pytest.mark.parametrize(
    "event",
    [
        LayoutAssigned(job="j", run="r", members=()),
        JobFailed(job="j", run="r", reason="it did", exit_code=1),
    ],
)
def test_nothing_is_waited_for_once_the_job_begins_or_ends(event: Event) -> None:
    assert waited_for([SUBMITTED, event], BUS) is None


def test_the_exception_of_the_first_traceback_is_found() -> None:
    frames = ["Traceback (most recent call last):", '  File "a.py", line 1', "    import no"]
    lines = ["hello", *frames, "ModuleNotFoundError: no", *frames, "ValueError: later"]
    assert last_line(lines) == "ModuleNotFoundError: no"
    assert last_line(["hello"]) is None
    assert last_line(frames) is None
