"""The webhook example against a real bus and a real receiver, while each of the three dies."""

import asyncio
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import nats
import pytest
from tests.chaos.job import Job
from tests.documents import ROOT, run_by

from trainmover.bus.job import JobBus
from trainmover.bus.nats import connect
from trainmover.bus.server import EmbeddedServer
from trainmover.schemas.base import Event
from trainmover.schemas.events import EVENTS, MigrationAborted, WorkerFailed
from trainmover.schemas.export import cloudevent
from trainmover.schemas.samples import SAMPLES

EXAMPLE = ROOT / "examples/alert_webhook.py"
SECRET = b"the job's secret"
JOB, RUN, STREAM = "llama", "r1", "TRAINMOVER_llama"
SUBMITTED = next(e for e in SAMPLES if e.TYPE == "job.submitted")
WITHIN_S = 15.0
HOLD = 0
"""The receiver takes the event and does not answer until the sender is gone."""

pytestmark = [pytest.mark.concurrent, pytest.mark.timeout(60)]


@dataclass(frozen=True)
class Posted:
    key: str
    content_type: str
    body: dict[str, Any]


class Watched:
    """What another thread changes, and this one awaits."""

    def __init__(self) -> None:
        self.changed = threading.Condition()

    async def has(self, condition: Callable[[], bool]) -> None:
        def wait() -> bool:
            with self.changed:
                return self.changed.wait_for(condition, WITHIN_S)

        assert await asyncio.to_thread(wait), vars(self)


class Receiver(Watched):
    """A webhook that answers as it is told, then 200. Use as a context manager."""

    def __init__(self, *answers: int, port: int = 0) -> None:
        super().__init__()
        self.answers = deque(answers)
        self.posts: list[tuple[int, Posted]] = []
        """The answer to each, and what came."""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                key, kind = self.headers["Idempotency-Key"], self.headers["Content-Type"]
                answer = receiver.answer(Posted(key, kind, body))
                if answer == HOLD:
                    self.connection.recv(1)  # empty: the sender is gone
                    self.close_connection = True
                else:
                    self.send_response(answer)
                    self.send_header("Location", "/elsewhere")
                    self.end_headers()

            def do_GET(self) -> None:
                receiver.answer(Posted("a redirection was followed", "", {}))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"

    def __enter__(self) -> "Receiver":
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, post: Posted) -> int:
        with self.changed:
            answer = self.answers.popleft() if self.answers else 200
            self.posts.append((answer, post))
            self.changed.notify_all()
            return answer

    @property
    def taken(self) -> list[str]:
        """Keys in the order in which they were answered with 200."""
        return [post.key for answer, post in self.posts if answer == 200]


class Alerter(Watched):
    """The example in a process of its own. Use as a context manager."""

    def __init__(self, bus: str, url: str, *more: str, job: str = JOB, secret: str = SECRET.hex()):
        super().__init__()
        flags = (f"--bus={bus}", f"--job={job}", f"--url={url}", *more)
        self.command: tuple[str, ...] = (sys.executable, str(EXAMPLE), *flags)
        self.environment = {**os.environ, "TRAINMOVER_SECRET": secret}
        self.lines: list[str] = []

    def __enter__(self) -> "Alerter":
        self.process = subprocess.Popen(
            self.command,
            env=self.environment,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(WITHIN_S)
        print("".join(self.lines))  # pytest shows it with a failure

    def _read(self) -> None:
        assert self.process.stderr
        with self.process.stderr as lines:
            for line in lines:
                with self.changed:
                    self.lines.append(line)
                    self.changed.notify_all()

    def said(self, text: str) -> list[str]:
        return [line for line in self.lines if text in line]

    async def says(self, text: str) -> None:
        await self.has(lambda: bool(self.said(text)))

    async def ends(self, signum: int = 0) -> int:
        """Its exit code, after a signal if one is given."""
        if signum:
            self.process.send_signal(signum)
        await asyncio.to_thread(self._reader.join, WITHIN_S)
        return self.process.wait(WITHIN_S)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return int(unused.getsockname()[1])


Start = Callable[..., Alerter]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path / "bus", token="secret-token")
    await server.start()
    yield server
    await server.stop()


@asynccontextmanager
async def submitted(server: EmbeddedServer) -> AsyncIterator[JobBus]:
    bus = await connect(server.url, JOB, deadline_s=10)
    job = JobBus(bus, job=JOB, run=RUN, source="detector", secret=SECRET)
    await job.publish(SUBMITTED)
    yield job
    await job.close()


@pytest.fixture
async def job(server: EmbeddedServer) -> AsyncIterator[JobBus]:
    async with submitted(server) as job:
        yield job


@pytest.fixture
def alerter(server: EmbeddedServer) -> Start:
    return lambda url, *more, **named: Alerter(server.url, url, *more, **named)


def failed(n: int) -> WorkerFailed:
    return WorkerFailed(
        job=JOB,
        run=RUN,
        workers=(f"m1-{n}", f"m1-{n}b"),
        kind="crash",
        machine="m1",
        evidence="killed by SIGKILL",
        reason="m1-1 was killed",
        first_evidence=1.0,
    )


def aborted(n: int) -> MigrationAborted:
    return MigrationAborted(job=JOB, run=RUN, generation=n + 2, incident="g2", reason="no answer")


def alerts(numbers: range) -> list[Event]:
    return [make(n) for n in numbers for make in (failed, aborted)]


def ids(events: list[Event]) -> list[str]:
    return [event.identity() for event in events]


async def publish(job: JobBus, events: list[Event]) -> None:
    for event in events:
        await job.publish(event)


async def test_what_is_asked_for_is_posted_in_order_and_nothing_else(
    job: JobBus, server: EmbeddedServer, alerter: Start
) -> None:
    chosen = [e for e in SAMPLES if e.TYPE in ("worker.failed", "job.failed", "job.completed")]
    others = [e for e in SAMPLES if e is not SUBMITTED and e not in chosen]
    bus = await connect(server.url, JOB, deadline_s=10)
    forger = JobBus(bus, job=JOB, run=RUN, source="mallory", secret=b"another")
    with Receiver() as receiver:
        types = "--types=worker.failed,job.failed,job.completed"
        with alerter(receiver.url, types, "--name=other") as process:
            await publish(job, others)
            await publish(forger, [failed(9)])
            await publish(job, chosen)
            await receiver.has(lambda: len(receiver.posts) >= len(chosen))
            assert await process.ends(signal.SIGTERM) == 0
        assert process.said("worker.failed.v1: not signed with the job's secret")
        assert process.said(f"ended: {len(chosen)} posted, 0 given up")
    await forger.close()
    assert receiver.taken == ids(chosen)
    for event, (_, post) in zip(chosen, receiver.posts, strict=True):
        expected = cloudevent(event)
        for of_the_publication in ("time", "source"):
            del expected[of_the_publication], post.body[of_the_publication]
        assert (post.body, post.content_type) == (expected, "application/cloudevents+json")


async def test_it_waits_for_the_bus_the_job_and_the_receiver(tmp_path: Path) -> None:
    bus, port = free_port(), free_port()
    server = EmbeddedServer(tmp_path / "late", port=bus, token="t")
    url = f"http://127.0.0.1:{port}/hook"
    with Alerter(f"nats://t@127.0.0.1:{bus}", url) as process:
        await process.says(f"no connection to 127.0.0.1:{bus}, trying on")
        await server.start()
        await process.says("no job llama on this bus yet; waiting for it")
        async with submitted(server) as job:
            await publish(job, [failed(0)])
            await process.says("again in 0.5 s: r1/worker.failed/m1-0+m1-0b: 0 ")
            with Receiver(503, port=port) as receiver:
                await receiver.has(lambda: receiver.taken == ids([failed(0)]))
    await server.stop()


async def test_a_kill_of_the_alerter_between_post_and_answer_repeats_the_event_and_loses_none(
    job: JobBus, alerter: Start
) -> None:
    events = alerts(range(4))
    with Receiver(200, 200, 200, HOLD) as receiver:
        await publish(job, events[:6])
        with alerter(receiver.url) as process:
            await receiver.has(lambda: len(receiver.posts) == 4)
            assert await process.ends(signal.SIGKILL) == -signal.SIGKILL
        await publish(job, events[6:])  # while nobody listens
        with alerter(receiver.url):
            await receiver.has(lambda: len(receiver.taken) == len(events))
    assert [post.key for _, post in receiver.posts[3:5]] == [events[3].identity()] * 2
    assert receiver.taken == ids(events)


async def test_a_kill_of_the_bus_loses_nothing_and_keeps_the_order(
    job: JobBus, server: EmbeddedServer, alerter: Start
) -> None:
    with Receiver() as receiver, alerter(receiver.url):
        await publish(job, alerts(range(10)))
        for start in (10, 20):
            os.kill(server.pid, signal.SIGKILL)  # wherever it is with those before
            await server.wait()
            waiting = asyncio.ensure_future(publish(job, alerts(range(start, start + 10))))
            await server.start()
            await waiting
        events = alerts(range(30))
        await receiver.has(lambda: set(receiver.taken) == set(ids(events)))
    assert list(dict.fromkeys(receiver.taken)) == ids(events)  # what is repeated is not passed


async def test_a_bus_that_lost_its_place_gets_it_again(
    job: JobBus, server: EmbeddedServer, alerter: Start
) -> None:
    with Receiver() as receiver, alerter(receiver.url) as process:
        await publish(job, [failed(0)])
        await process.says("posted")
        client = await nats.connect(server.url)
        await client.jetstream().delete_consumer(STREAM, "alerts")
        await client.close()
        await publish(job, [failed(1)])
        await receiver.has(lambda: failed(1).identity() in receiver.taken)


async def test_what_the_receiver_refuses_is_given_up_and_shown(job: JobBus, alerter: Start) -> None:
    await publish(job, [failed(0), failed(1), failed(2)])
    with (
        Receiver(404, 500, 404, 301, 301) as receiver,
        alerter(receiver.url, "--give-up-after=2") as process,
    ):
        await receiver.has(lambda: receiver.taken == ids([failed(2)]))
        assert await process.ends(signal.SIGTERM) == 1
    refused = [post.key for _, post in receiver.posts[:5]]
    assert refused == ids([failed(0)]) * 3 + ids([failed(1)]) * 2
    lines = process.said("GIVEN UP")
    assert [line.partition("GIVEN UP: ")[2][:4] for line in lines] == ["404 ", "301 "]
    shown = [json.loads(line[line.index("{") :]) for line in lines]
    assert [document["id"] for document in shown] == ids([failed(0), failed(1)])


async def test_another_secret_ends_it_and_takes_nothing(job: JobBus, alerter: Start) -> None:
    await publish(job, [failed(0)])
    with Receiver() as receiver:
        for wrong in (b"another", b""):
            with alerter(receiver.url, secret=wrong.hex()) as process:
                assert await process.ends() == 2
            assert process.said("set TRAINMOVER_SECRET to that of the job")
        with alerter(receiver.url):
            await receiver.has(lambda: receiver.taken == ids([failed(0)]))


async def test_sigterm_gives_back_what_is_not_posted(
    job: JobBus, server: EmbeddedServer, alerter: Start
) -> None:
    await publish(job, [failed(0)])
    with Receiver(500) as receiver, alerter(receiver.url) as process:
        await process.says("again in")
        assert await process.ends(signal.SIGTERM) == 0
    client = await nats.connect(server.url)
    place = await client.jetstream().pull_subscribe_bind("alerts", STREAM)
    (message,) = await place.fetch(1, timeout=1.5)  # at once: silence would keep it for 3 s
    assert (message.headers or {}).get("ce-id") == failed(0).identity()
    await client.close()


async def test_slack_gets_a_sentence(job: JobBus, alerter: Start) -> None:
    with Receiver() as receiver, alerter(receiver.url, "--format=slack"):
        await publish(job, [failed(0), aborted(0)])
        await receiver.has(lambda: len(receiver.taken) == 2)
    assert [post.body for _, post in receiver.posts] == [
        {"text": "llama: m1-0, m1-0b on m1 failed (crash): m1-1 was killed"},
        {"text": "llama: recovery g2 was aborted in generation 2: no answer"},
    ]


async def test_the_command_of_the_manual_posts(
    job: JobBus, server: EmbeddedServer, alerter: Start
) -> None:
    (block,) = run_by("test_the_command_of_the_manual_posts")
    await publish(job, [failed(0)])
    with Receiver() as receiver:
        for written, meant in {
            "nats://bus-host:4222": server.url,
            "https://alerts.example.com/hook": receiver.url,
            "SECRET=...": f"SECRET={SECRET.hex()}",
            "python ": f"exec {sys.executable} ",
        }.items():
            assert written in block
            block = block.replace(written, meant)
        process = alerter(receiver.url)
        process.command = ("bash", "-euc", block)
        with process:
            await receiver.has(lambda: receiver.taken == ids([failed(0)]))


def test_every_sentence_fits_its_event() -> None:
    example = runpy.run_path(str(EXAMPLE))
    assert example["SENTENCES"].keys() <= EVENTS.keys()
    for event in SAMPLES:
        if event.TYPE in example["SENTENCES"]:
            (text,) = example["slack"](cloudevent(event)).values()
            assert text.startswith("llama: ")
            assert "{" not in text


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--url=ftp://host/hook", "--url or ALERT_URL: expected http(s)://"),
        ("--bus=host:4222", "--bus: expected nats://host:port"),
        ("--types=worker.fail", "--types: expected some of worker.failed, migration.aborted"),
        ("--name=A.b", "--name: expected [a-z0-9-]"),
    ],
)
def test_wrong_usage_says_what_is_expected(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parse = runpy.run_path(str(EXAMPLE))["parse"]
    with pytest.raises(SystemExit, match="2"):
        parse(["--bus=nats://h:4222", "--job=j", "--url=http://h/", word])
    assert said in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.timeout(180)
async def test_a_kill_in_a_real_job_is_told_while_the_job_goes_on(tmp_path: Path) -> None:
    arguments = ("--steps=60", f"--folder={tmp_path}")
    with Job(tmp_path, "everything.py", script_args=arguments) as job, Receiver() as receiver:
        job.pace(10)
        await asyncio.to_thread(job.wait_for, "a standby", lambda: bool(job.parked()))
        session = json.loads((tmp_path / "xdg" / "trainmover" / f"{job.name}.json").read_text())
        url, secret = session["url"], session["secret"]
        with Alerter(url, receiver.url, job=job.name, secret=secret) as process:
            await process.says("listening")
            victim = job.assignment()[1]
            os.kill(job.pid(victim), signal.SIGKILL)
            await receiver.has(lambda: bool(receiver.posts))
            assert not job.of("job.completed")
            job.pace(100)
            assert (await asyncio.to_thread(job.finish)).code == 0
            assert await process.ends(signal.SIGTERM) == 0
    assert [post.body["data"]["workers"] for _, post in receiver.posts] == [[victim]]
