"""The service loop, with toy services over the in-memory bus."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from trainmover.bus.job import JobBus
from trainmover.bus.memory import MemoryBus
from trainmover.bus.port import Refused
from trainmover.schemas import subjects
from trainmover.schemas.base import Event
from trainmover.schemas.commands import Answer, AnyCommand, Retire, Stage
from trainmover.schemas.events import (
    JobFailed,
    JobStarted,
    LayoutAssigned,
    MigrationCompleted,
    PoolReplenished,
    StandbyLost,
)
from trainmover.schemas.local import Telemetry
from trainmover.schemas.member import Member
from trainmover.schemas.recorded import Recorded
from trainmover.services import shell
from trainmover.services.contract import Ask, Inputs, Output, Service
from trainmover.telemetry.spans import SILENT
from trainmover.telemetry.stream import StreamTracer


def silent() -> StreamTracer:
    return StreamTracer(SILENT, "toy")


@dataclass(frozen=True, slots=True)
class Seen:
    events: tuple[Event, ...] = ()
    seqs: tuple[int, ...] = ()
    times: tuple[float, ...] = ()

    def count(self, kind: type[Event]) -> int:
        return sum(isinstance(e, kind) for e in self.events)


def remember(state: Seen, recorded: Recorded) -> Seen:
    return replace(
        state,
        events=(*state.events, recorded.event),
        seqs=(*state.seqs, recorded.seq),
        times=(*state.times, recorded.time_s),
    )


def completed(generation: int) -> MigrationCompleted:
    return MigrationCompleted(
        job="j", run="r", generation=generation, incident=f"g{generation}", committed=0
    )


def replenished(worker: str) -> PoolReplenished:
    return PoolReplenished(job="j", run="r", worker=worker)


Decide = Callable[[Seen, Inputs], Sequence[Output]]


class House:
    """One in-memory bus and the services that run on it."""

    def __init__(self) -> None:
        self.memory = MemoryBus()
        self.bus = self.connect()

    def connect(self) -> JobBus:
        return JobBus(self.memory, job="j", run="r", source="test", secret=b"s")

    @asynccontextmanager
    async def serving(self, *decides: Decide, linger_s: float = 60.0) -> AsyncIterator[None]:
        stop = asyncio.Event()
        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            for decide in decides:
                service = Service("toy", Seen(), remember, decide)
                tasks.create_task(
                    shell.run(
                        service, self.connect(), silent(), stop=stop, tick_s=0.01, linger_s=linger_s
                    )
                )
            yield
            stop.set()

    async def until(self, seq: int) -> list[Recorded]:
        found: list[Recorded] = []
        async with asyncio.timeout(5):
            async for recorded in self.bus.follow():
                found.append(recorded)
                if recorded.seq >= seq:
                    break
        return found


@pytest.fixture
def house() -> House:
    return House()


def count_up_to(last: int) -> Decide:
    """Decides the generations 2..last, one after the other."""

    def decide(state: Seen, _inputs: Inputs) -> Sequence[Output]:
        done = state.count(MigrationCompleted)
        return [completed(done + 2)] if done + 2 <= last else []

    return decide


async def test_a_decision_is_published_and_read_back_before_the_next(house: House) -> None:
    async with house.serving(count_up_to(6)):
        found = await house.until(5)
    assert [r.event for r in found] == [completed(g) for g in range(2, 7)]


async def test_two_copies_of_a_service_make_one_decision_each_time(house: House) -> None:
    async with house.serving(count_up_to(12), count_up_to(12)):
        found = await house.until(11)
    assert [r.event for r in found] == [completed(g) for g in range(2, 13)]
    assert await house.bus.last_seq() == 11


async def test_two_copies_that_disagree_follow_who_came_first(house: House) -> None:
    def assign(machine: str) -> Decide:
        member = Member(rank=0, worker="w", machine=machine, addresses=())
        event = LayoutAssigned(job="j", run="r", members=(member,))

        def decide(state: Seen, _inputs: Inputs) -> Sequence[Output]:
            if not state.count(LayoutAssigned):
                return [event]
            if not state.count(JobStarted):
                return [JobStarted(job="j", run="r")]
            return []

        return decide

    async with house.serving(assign("a"), assign("b")):
        found = await house.until(2)
    assert [r.event.TYPE for r in found] == ["layout.assigned", "job.started"]


async def test_nothing_is_decided_before_the_end_of_the_stream_is_reached(house: House) -> None:
    for n in range(5):
        await house.bus.publish(replenished(f"w{n}"))
    await house.memory.publish("trainmover.j.pool.replenished.v1", b"unsigned, the last", {})
    states: list[int] = []
    decided = asyncio.Event()

    def decide(state: Seen, _inputs: Inputs) -> Sequence[Output]:
        states.append(len(state.events))
        decided.set()
        return []

    async with house.serving(decide):
        await decided.wait()
    assert states[0] == 5


async def test_a_rejected_message_on_its_subject_does_not_block_a_decision(house: House) -> None:
    await house.memory.publish(subjects.event("j", completed(2)), b"unsigned", {})
    async with house.serving(count_up_to(2)):
        found = await house.until(2)
    assert [r.event for r in found] == [completed(2)]


async def test_an_output_is_published_once_however_often_it_is_decided(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[Event] = []
    publish = JobBus.publish

    async def counting(self: JobBus, event: Event) -> int:
        published.append(event)
        return await publish(self, event)

    monkeypatch.setattr(JobBus, "publish", counting)
    decided = asyncio.Semaphore(0)

    def decide(state: Seen, _inputs: Inputs) -> Sequence[Output]:
        decided.release()
        return [replenished("w")]

    async with house.serving(decide):
        for _ in range(5):
            await decided.acquire()
    assert published == [replenished("w")]


async def test_a_publish_that_was_refused_is_tried_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "REFUSED_S", 0.01)
    store, tries = MemoryBus.publish, 0

    async def publish(
        self: MemoryBus, subject: str, payload: bytes, headers: dict[str, str]
    ) -> int:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise Refused("the disk is full")
        return await store(self, subject, payload, headers)

    monkeypatch.setattr(MemoryBus, "publish", publish)

    def decide(state: Seen, _inputs: Inputs) -> Sequence[Output]:
        return [] if state.events else [replenished("w")]

    async with house.serving(decide):
        assert [r.event for r in await house.until(1)] == [replenished("w")]
    assert tries == 3


async def test_an_answer_to_a_command_is_an_input_of_the_next_decision(house: House) -> None:
    heard: list[AnyCommand] = []

    async def handler(command: AnyCommand) -> Answer:
        heard.append(command)
        return Answer(worker="w", stage=Stage.RESUMED)

    await house.bus.answer("w", handler)

    def decide(state: Seen, inputs: Inputs) -> Sequence[Output]:
        if inputs.answers:
            return [
                StandbyLost(job="j", run="r", worker="w", reason=inputs.answers["w"].stage.name)
            ]
        return [Ask("w", Retire(reason="go")), Ask("nobody", Retire(reason="go"))]

    async with house.serving(decide):
        (lost,) = await house.until(1)
    assert isinstance(lost.event, StandbyLost)
    assert lost.event.reason == "RESUMED"
    assert heard == [Retire(reason="go")]


async def test_one_command_is_under_way_per_worker_and_the_latest_wanted_follows(
    house: House,
) -> None:
    go, first_heard = asyncio.Event(), asyncio.Event()
    heard: list[str] = []
    wanted, under_way = "one", 0

    async def handler(command: AnyCommand) -> Answer:
        nonlocal under_way
        assert isinstance(command, Retire)
        under_way += 1
        assert under_way == 1
        heard.append(command.reason)
        first_heard.set()
        await go.wait()
        under_way -= 1
        return Answer(worker="w")

    await house.bus.answer("w", handler)
    decided = asyncio.Semaphore(0)

    def decide(state: Seen, _inputs: Inputs) -> Sequence[Output]:
        decided.release()
        return [Ask("w", Retire(reason=wanted))]

    async with house.serving(decide):
        await first_heard.wait()
        wanted = "two"
        await decided.acquire()
        await decided.acquire()
        wanted = "three"
        go.set()
        async with asyncio.timeout(5):
            while heard[-1] != "three":
                await decided.acquire()
    assert heard[:2] == ["one", "three"]


async def test_an_equal_command_is_paced_and_another_is_not(house: House) -> None:
    loop = asyncio.get_running_loop()
    heard: list[tuple[str, float]] = []
    enough = asyncio.Event()

    async def handler(command: AnyCommand) -> Answer:
        assert isinstance(command, Retire)
        heard.append((command.reason, loop.time()))
        if len(heard) == 4:
            enough.set()
        return Answer(worker="w")

    await house.bus.answer("w", handler)

    def decide(state: Seen, _inputs: Inputs) -> Sequence[Output]:
        return [Ask("w", Retire(reason="same" if len(heard) < 3 else "new"))]

    async with house.serving(decide):
        await enough.wait()
    assert [reason for reason, _ in heard[:4]] == ["same", "same", "same", "new"]
    times = [when for _, when in heard]
    assert times[1] - times[0] >= shell.PACE_S
    assert times[2] - times[1] >= shell.PACE_S
    assert times[3] - times[2] < shell.PACE_S


async def test_time_is_that_of_the_stream_and_telemetry_is_heard_on_the_same_clock(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs: asyncio.Queue[Inputs] = asyncio.Queue()

    def decide(state: Seen, now: Inputs) -> Sequence[Output]:
        if state.events and "m1" in now.heard:
            inputs.put_nowait(now)
        return []

    monkeypatch.setattr(time, "time", lambda: 5000.0)  # the server's clock, far from ours
    await house.bus.publish(replenished("w"))
    async with house.serving(decide):
        await asyncio.sleep(0.02)
        await house.bus.telemetry(
            Telemetry(job="j", run="r", machine="m1", interval_s=0.5, workers=())
        )
        now = await inputs.get()
        later = await inputs.get()
    assert 5000.0 < now.heard["m1"] <= now.now_s < later.now_s < 5010.0
    assert later.heard["m1"] == pytest.approx(now.heard["m1"])
    assert 4990.0 < now.up_since_s <= now.heard["m1"]


async def test_after_the_end_of_the_job_it_lingers_and_ends(house: House) -> None:
    calls = 0

    def decide(state: Seen, _inputs: Inputs) -> Sequence[Output]:
        nonlocal calls
        calls += bool(state.events)
        return [] if state.events else [JobFailed(job="j", run="r", reason="x", exit_code=4)]

    service = Service("toy", Seen(), remember, decide)
    async with asyncio.timeout(5):
        await shell.run(
            service, house.bus, silent(), stop=asyncio.Event(), tick_s=0.01, linger_s=0.05
        )
    assert calls >= 3


@pytest.mark.parametrize("where", ["evolve", "decide"])
async def test_an_exception_in_a_pure_function_ends_the_service_and_names_the_place(
    house: House, where: str
) -> None:
    await house.bus.publish(replenished("w7"))

    def evolve(state: Seen, recorded: Recorded) -> Seen:
        if where == "evolve":
            raise ZeroDivisionError
        return state

    def decide(state: Seen, _inputs: Inputs) -> Sequence[Output]:
        raise ZeroDivisionError

    async with asyncio.timeout(5):
        with pytest.raises(shell.ServiceBug, match=rf"toy: {where} failed .*1"):
            await shell.run(
                Service("toy", Seen(), evolve, decide), house.bus, silent(), stop=asyncio.Event()
            )


async def test_a_decision_of_another_run_is_a_bug_that_ends_the_service(house: House) -> None:
    def decide(state: Seen, _inputs: Inputs) -> Sequence[Output]:
        return [JobStarted(job="j", run="other")]

    async with asyncio.timeout(5):
        with pytest.raises(ValueError, match="run other"):
            await shell.run(
                Service("toy", Seen(), remember, decide),
                house.bus,
                silent(),
                stop=asyncio.Event(),
            )
