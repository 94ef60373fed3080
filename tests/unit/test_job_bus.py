"""Typed and signed messages over the in-memory bus."""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import pytest
from structlog.testing import capture_logs

from trainmover.bus.job import RUN, JobBus, Skipped
from trainmover.bus.memory import MemoryBus
from trainmover.bus.port import Message, Missing, Reply, Unanswered
from trainmover.schemas import subjects
from trainmover.schemas.commands import Answer, AnyCommand, Retire, Stage
from trainmover.schemas.envelope import MAC, mac, seal
from trainmover.schemas.events import JobStarted, PoolReplenished
from trainmover.schemas.local import Telemetry
from trainmover.schemas.recorded import Recorded

SECRET = b"the job's secret"
STARTED = JobStarted(job="j", run="r")
REPLENISHED = PoolReplenished(job="j", run="r", worker="w1")
RETIRE = Retire(reason="the job is over")
TELEMETRY = Telemetry(job="j", run="r", machine="m1", interval_s=0.5, workers=())

T = TypeVar("T")


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus()


@pytest.fixture
def job(bus: MemoryBus) -> JobBus:
    return JobBus(bus, job="j", run="r", source="test", secret=SECRET)


async def first(items: AsyncIterator[T], count: int) -> list[T]:
    found: list[T] = []
    async with asyncio.timeout(5):
        while len(found) < count:
            found.append(await anext(items))
    return found


async def where(_command: AnyCommand) -> Answer:
    return Answer(worker="w1", stage=Stage.RESUMED)


async def test_an_event_comes_back_with_its_seq_and_times(job: JobBus) -> None:
    assert await job.publish(STARTED, time_s=1000.5) == 1
    assert await job.publish(REPLENISHED) == 2
    one, two = await first(job.follow(), 2)
    assert (one.event, one.seq, one.occurred_s) == (STARTED, 1, 1000.5)
    assert (two.event, two.seq) == (REPLENISHED, 2)
    assert one.time_s > 1.6e9
    assert await job.last_seq() == 2


async def test_the_same_event_published_again_is_stored_once(job: JobBus) -> None:
    assert [await job.publish(STARTED), await job.publish(STARTED)] == [1, 1]


async def test_a_decision_that_came_second_is_lost(job: JobBus, bus: MemoryBus) -> None:
    other = JobBus(bus, job="j", run="r", source="copy", secret=SECRET)
    wins = [await b.publish_once(STARTED, last_subject_seq=0) for b in (job, other)]
    assert wins == [True, False]


async def test_an_event_of_another_run_is_not_published(job: JobBus) -> None:
    with pytest.raises(ValueError, match=r"expected an event of run r .* of run old"):
        await job.publish(JobStarted(job="j", run="old"))


async def test_what_is_not_an_acceptable_event_is_logged_and_skipped(
    job: JobBus, bus: MemoryBus
) -> None:
    good = seal(STARTED, source="x", time_s=0, secret=SECRET)
    subject, payload, headers = good

    def signed(subject: str, payload: bytes) -> tuple[str, bytes, dict[str, str]]:
        return subject, payload, {MAC: mac(SECRET, subject, payload)}

    bad = {
        "expected a Trainmover-Mac header": (subject, payload, {}),
        "made with the job secret": (subject, payload + b" ", {MAC: headers[MAC]}),
        "payload: Invalid JSON": signed(subject, b"{nonsense"),
        "run: Field required": signed(subject, b'{"job": "j"}'),
        "version v1 is known": signed("trainmover.j.job.started.v2", payload),
        "an unknown type": signed("trainmover.j.job.exploded.v1", payload),
        "of job k": signed("trainmover.k.job.started.v1", payload),
        "names job k": signed(subject, b'{"job": "k", "run": "r"}'),
        "of run old, this is run r": signed(subject, b'{"job": "j", "run": "old"}'),
        "at most": signed(subject, b" " * 600_000),
        "expected trainmover.<job>": signed("trainmover.j.job", payload),
    }
    for message in bad.values():
        await bus.publish(*message)
    await bus.publish(*good)
    with capture_logs() as logs:
        (event,) = await first(job.follow(), 1)
    assert (event.event, event.seq) == (STARTED, len(bad) + 1)
    reasons = [line["reason"] for line in logs if line["event"] == "bus.message_rejected"]
    assert len(reasons) == len(bad)
    for expected, reason in zip(bad, reasons, strict=True):
        assert expected in reason


async def test_who_counts_seqs_sees_the_places_of_what_was_skipped(
    job: JobBus, bus: MemoryBus
) -> None:
    await bus.publish(subjects.event("j", STARTED), b"unsigned", {})
    await job.publish(REPLENISHED)
    one, two = await first(job.read(), 2)
    assert one == Skipped(1, "trainmover.j.job.started.v1")
    assert isinstance(two, Recorded)


async def test_without_a_secret_unsigned_events_are_accepted(bus: MemoryBus) -> None:
    job = JobBus(bus, job="j", run="r", source="test", secret=b"")
    await bus.publish(*seal(STARTED, source="x", time_s=0, secret=b""))
    assert [r.event for r in await first(job.follow(), 1)] == [STARTED]


async def test_a_command_reaches_its_worker_and_the_answer_comes_back(job: JobBus) -> None:
    heard: list[AnyCommand] = []

    async def handler(command: AnyCommand) -> Answer:
        heard.append(command)
        return await where(command)

    await job.answer("w1", handler)
    answer = await job.ask("w1", RETIRE, timeout_s=5)
    assert (heard, answer.stage) == ([RETIRE], Stage.RESUMED)
    with pytest.raises(Unanswered):
        await job.ask("w2", RETIRE, timeout_s=5)


@pytest.mark.parametrize(
    ("run", "secret"), [("old", SECRET), ("r", b"another"), ("r", b"")], ids=str
)
async def test_a_command_of_another_run_or_secret_is_refused(
    job: JobBus, bus: MemoryBus, run: str, secret: bytes
) -> None:
    await job.answer("w1", where)
    foreign = JobBus(bus, job="j", run=run, source="x", secret=secret)
    with capture_logs() as logs, pytest.raises(Unanswered):
        await foreign.ask("w1", RETIRE, timeout_s=0.02)
    assert [line["event"] for line in logs] == ["bus.command_rejected"]


async def test_an_unknown_command_is_logged_and_not_answered(job: JobBus, bus: MemoryBus) -> None:
    await job.answer("w1", where)
    subject, payload = subjects.command("j", "w1"), b'{"kind": "dance"}'
    headers = {RUN: "r", MAC: mac(SECRET, subject, payload)}
    with capture_logs() as logs, pytest.raises(Unanswered):
        await bus.request(subject, payload, headers, 0.02)
    assert "dance" in logs[0]["reason"]


async def test_an_answer_to_another_command_does_not_count(job: JobBus, bus: MemoryBus) -> None:
    subject = subjects.command("j", "w1")
    answer = Answer(worker="w1").model_dump_json().encode()

    async def replay(message: Message) -> Reply:
        return answer, {MAC: mac(SECRET, subject, b"an older command\n" + answer)}

    await bus.respond(subject, replay)
    with capture_logs() as logs, pytest.raises(Unanswered, match="not acceptable"):
        await job.ask("w1", RETIRE, timeout_s=5)
    assert [line["event"] for line in logs] == ["bus.answer_rejected"]


async def test_telemetry_is_heard_unless_it_is_unsigned_or_of_another_run(
    job: JobBus, bus: MemoryBus
) -> None:
    heard: asyncio.Queue[Telemetry] = asyncio.Queue()
    await job.on_telemetry(heard.put)
    subject = subjects.telemetry("j", "m1")
    old = JobBus(bus, job="j", run="old", source="x", secret=SECRET)
    with capture_logs() as logs:
        await bus.tell(subject, TELEMETRY.model_dump_json().encode(), {})
        await old.telemetry(TELEMETRY.model_copy(update={"run": "old"}))
        await job.telemetry(TELEMETRY)
        assert await asyncio.wait_for(heard.get(), 5) == TELEMETRY
    assert [line["event"] for line in logs] == ["bus.telemetry_rejected"] * 2
    assert heard.empty()


async def test_an_object_comes_back_to_who_knows_the_secret(job: JobBus, bus: MemoryBus) -> None:
    await job.put("tape", b"\x00data")
    assert await job.get("tape") == b"\x00data"
    other = JobBus(bus, job="j", run="r2", source="test", secret=b"another secret")
    with capture_logs() as logs, pytest.raises(Missing, match="'tape' is not of this run"):
        await other.get("tape")
    assert [line["event"] for line in logs] == ["bus.object_rejected"]


async def test_an_object_that_was_changed_or_moved_is_missing(job: JobBus, bus: MemoryBus) -> None:
    await job.put("tape", b"data")
    stored = bus.objects["tape"]
    bus.objects |= {"moved": stored, "tape": stored[:-1] + b"A", "noise": b"\xff" * 80}
    for name in ("tape", "moved", "noise"):
        with pytest.raises(Missing, match="not of this run"):
            await job.get(name)
