"""What every bus must show; run against the in-memory twin and against a real server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from trainmover.bus.port import (
    MSG_ID,
    Bus,
    BusClosed,
    Conflict,
    Message,
    Missing,
    Reply,
    Unanswered,
)

STARTED = "trainmover.j.job.started.v1"
FAILED = "trainmover.j.worker.failed.v1"
TELEMETRY = "trainmover.j.telemetry.m1.v1"
COMMAND = "trainmover.j.command.w1.v1"


async def first(messages: AsyncIterator[Message], count: int) -> list[Message]:
    found: list[Message] = []
    async with asyncio.timeout(10):
        while len(found) < count:
            found.append(await anext(messages))
    return found


class BusBehaviour:
    """A subclass has the fixture `bus`, connected for job `j` with an empty stream."""

    async def test_what_is_stored_is_followed_from_the_start_with_seq_time_and_headers(
        self, bus: Bus
    ) -> None:
        assert await bus.last_seq() == 0
        assert await bus.publish(STARTED, b"one", {"a": "1"}) == 1
        assert await bus.publish(FAILED, b"two", {}) == 2
        assert await bus.last_seq() == 2
        one, two = await first(bus.follow(0), 2)
        assert (one.subject, one.payload, one.seq, one.headers["a"]) == (STARTED, b"one", 1, "1")
        assert (two.subject, two.payload, two.seq) == (FAILED, b"two", 2)
        assert 1.6e9 < one.time_s <= two.time_s

    async def test_a_follower_starts_behind_a_seq_and_sees_what_comes_later(self, bus: Bus) -> None:
        for n in range(3):
            await bus.publish(STARTED, b"%d" % n, {})
        async with aclosing(bus.follow(2)) as messages:
            assert [m.payload for m in await first(messages, 1)] == [b"2"]
            later = asyncio.ensure_future(anext(messages))
            await bus.publish(FAILED, b"live", {})
            assert (await asyncio.wait_for(later, 10)).payload == b"live"

    async def test_two_followers_see_the_same_order_of_concurrent_publishers(
        self, bus: Bus
    ) -> None:
        await asyncio.gather(*(bus.publish(FAILED, b"%d" % n, {}) for n in range(30)))
        one, other = await asyncio.gather(first(bus.follow(0), 30), first(bus.follow(0), 30))
        assert [m.payload for m in one] == [m.payload for m in other]
        assert [m.seq for m in one] == list(range(1, 31))

    async def test_a_duplicate_id_is_stored_once_and_gets_the_seq_of_the_first(
        self, bus: Bus
    ) -> None:
        first_seq = await bus.publish(STARTED, b"x", {MSG_ID: "r/1"})
        await bus.publish(FAILED, b"between", {MSG_ID: "r/2"})
        assert await bus.publish(STARTED, b"x", {MSG_ID: "r/1"}) == first_seq
        assert await bus.last_seq() == 2

    async def test_an_expected_seq_that_is_not_the_subjects_last_is_a_conflict(
        self, bus: Bus
    ) -> None:
        assert await bus.publish_expecting(STARTED, b"a", {MSG_ID: "a"}, 0) == 1
        await bus.publish(FAILED, b"another subject", {})
        with pytest.raises(Conflict, match=r"job\.started"):
            await bus.publish_expecting(STARTED, b"b", {MSG_ID: "b"}, 0)
        assert await bus.publish_expecting(STARTED, b"c", {MSG_ID: "c"}, 1) == 3

    async def test_a_decision_with_the_id_of_a_stored_one_is_a_conflict(self, bus: Bus) -> None:
        await bus.publish_expecting(STARTED, b"a", {MSG_ID: "same"}, 0)
        with pytest.raises(Conflict):
            await bus.publish_expecting(STARTED, b"b", {MSG_ID: "same"}, 0)
        with pytest.raises(Conflict):
            await bus.publish_expecting(STARTED, b"b", {MSG_ID: "same"}, 1)
        assert await bus.last_seq() == 1

    async def test_of_many_who_decide_at_once_exactly_one_wins(self, bus: Bus) -> None:
        tries = (bus.publish_expecting(STARTED, b"%d" % n, {MSG_ID: str(n)}, 0) for n in range(8))
        results = await asyncio.gather(*tries, return_exceptions=True)
        assert sorted(type(r).__name__ for r in results) == ["Conflict"] * 7 + ["int"]

    async def test_told_messages_reach_who_listens_with_a_wildcard_and_are_not_stored(
        self, bus: Bus
    ) -> None:
        heard: asyncio.Queue[Message] = asyncio.Queue()
        await bus.listen("trainmover.j.telemetry.*.v1", heard.put)
        await bus.tell("trainmover.j.telemetry.m1.other.v1", b"not for us", {})
        await bus.tell(TELEMETRY, b"hello", {"h": "1"})
        message = await asyncio.wait_for(heard.get(), 10)
        assert (message.subject, message.payload, message.headers["h"]) == (
            TELEMETRY,
            b"hello",
            "1",
        )
        assert await bus.last_seq() == 0

    async def test_a_handler_that_raises_does_not_end_its_subscription(self, bus: Bus) -> None:
        heard: asyncio.Queue[bytes] = asyncio.Queue()

        async def handler(message: Message) -> None:
            if message.payload == b"bad":
                raise RuntimeError("a bug in the handler")
            await heard.put(message.payload)

        await bus.listen(TELEMETRY, handler)
        await bus.tell(TELEMETRY, b"bad", {})
        await bus.tell(TELEMETRY, b"good", {})
        assert await asyncio.wait_for(heard.get(), 10) == b"good"

    async def test_after_unsubscribing_nothing_is_heard(self, bus: Bus) -> None:
        one: asyncio.Queue[Message] = asyncio.Queue()
        other: asyncio.Queue[Message] = asyncio.Queue()
        subscription = await bus.listen(TELEMETRY, one.put)
        await bus.listen(TELEMETRY, other.put)
        await subscription.unsubscribe()
        await bus.tell(TELEMETRY, b"x", {})
        await asyncio.wait_for(other.get(), 10)
        assert one.empty()

    async def test_a_request_gets_the_answer_with_its_headers(self, bus: Bus) -> None:
        async def echo(message: Message) -> Reply:
            return message.payload + message.headers["h"].encode(), {"r": "2"}

        await bus.respond(COMMAND, echo)
        reply = await bus.request(COMMAND, b"ask", {"h": "1"}, 10)
        assert (reply.payload, reply.headers["r"]) == (b"ask1", "2")

    async def test_a_slow_answer_does_not_hold_up_the_next_request(self, bus: Bus) -> None:
        go = asyncio.Event()

        async def answer(message: Message) -> Reply:
            if message.payload == b"slow":
                await go.wait()
            return message.payload, {}

        await bus.respond(COMMAND, answer)
        slow = asyncio.ensure_future(bus.request(COMMAND, b"slow", {}, 10))
        assert (await bus.request(COMMAND, b"fast", {}, 10)).payload == b"fast"
        go.set()
        assert (await slow).payload == b"slow"

    async def test_a_request_to_nobody_is_unanswered_at_once(self, bus: Bus) -> None:
        async with asyncio.timeout(5):
            with pytest.raises(Unanswered, match="nobody listens"):
                await bus.request(COMMAND, b"x", {}, 60)

    async def test_a_request_that_is_refused_or_fails_runs_into_its_deadline(
        self, bus: Bus
    ) -> None:
        async def silent(message: Message) -> Reply | None:
            if message.payload == b"bad":
                raise RuntimeError("a bug in the handler")
            return None

        await bus.respond(COMMAND, silent)
        for payload in (b"bad", b"refused"):
            with pytest.raises(Unanswered, match=r"no answer within 0\.05 s"):
                await bus.request(COMMAND, payload, {}, 0.05)

    async def test_an_object_comes_back_whole_whatever_its_size_and_name(self, bus: Bus) -> None:
        large = bytes(range(256)) * 8192  # several chunks
        objects = {"first": large, "a role/class, *.>": b"small", "empty": b""}
        for name, data in objects.items():
            await bus.put(name, data)
        for name, data in objects.items():
            assert await bus.get(name) == data

    async def test_a_newer_object_takes_the_place_of_the_older(self, bus: Bus) -> None:
        await bus.put("x", b"old")
        await bus.put("x", b"new")
        assert await bus.get("x") == b"new"

    async def test_an_object_that_nobody_put_is_missing(self, bus: Bus) -> None:
        with pytest.raises(Missing, match="no object 'x'"):
            await bus.get("x")
        await bus.put("y", b"")
        with pytest.raises(Missing, match="no object 'x'"):
            await bus.get("x")

    async def test_objects_are_no_messages(self, bus: Bus) -> None:
        await bus.put("x", b"data")
        assert await bus.last_seq() == 0

    async def test_a_closed_bus_says_so_to_publishers_and_followers(self, bus: Bus) -> None:
        waiting = asyncio.ensure_future(first(bus.follow(0), 1))
        await asyncio.sleep(0)
        await bus.close()
        with pytest.raises(BusClosed):
            await asyncio.wait_for(waiting, 10)
        with pytest.raises(BusClosed):
            await asyncio.wait_for(bus.publish(STARTED, b"", {}), 10)
        await bus.close()
