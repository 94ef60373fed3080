"""Posts the events of a job that somebody should hear of to a webhook, each at least once.

    export TRAINMOVER_SECRET=...                         # the job's
    python alert_webhook.py --bus nats://bus-host:4222 --job llama --url https://example.com/hook
    ALERT_URL=https://hooks.slack.com/services/... python alert_webhook.py \\
        --bus nats://bus-host:4222 --job llama --format slack --types worker.failed,job.failed

It needs only nats-py, runs anywhere, and may start before the job. Its place among the events is
kept on the bus under --name: nothing is lost while this process, the bus or the receiver is down,
and the first start begins with the job's first event. Two of the same name share the work, so one
may be a spare; two receivers need two names.

Events are posted one after the other in the order of the bus. An event is done when the receiver
answers 2xx. No answer, 5xx, 408, 425 and 429 are tried again without end, and what follows waits.
Any other answer, redirections too, is tried --give-up-after times; then the event is logged as
GIVEN UP, whole, and the next one follows. An event that comes twice, since this process or the
bus died in between, has the same Idempotency-Key. What is not signed with the secret is logged
and not posted.

SIGTERM and Ctrl-C end it when the receiver has answered. Exit code 0; 1 if events were given up;
2 for wrong usage or a wrong secret.
"""

import argparse
import asyncio
import hashlib
import hmac
import http.client
import json
import logging
import math
import os
import re
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

log = logging.getLogger("alert_webhook")
Document = dict[str, Any]

SENTENCES: dict[str, str] = {
    "worker.failed": "{workers} on {machine} failed ({kind}): {reason}",
    "migration.aborted": "recovery {incident} was aborted in generation {generation}: {reason}",
    "job.stalled": "the job waits: {reason}; {unblocked_by}",
    "job.failed": "the job failed with exit code {exit_code}: {reason}",
    "pool.exhausted": "{needed} standbys are needed, {free} are free",
    "migration.completed": "recovery {incident} is completed, the job trains on",
    "job.completed": "the job is completed after {completed_steps} steps",
}
"""Types that can be asked for, and what a person reads of them."""

DEFAULT_TYPES = ("worker.failed", "migration.aborted", "job.stalled", "job.failed")
AGAIN = (408, 425, 429)
POST_S, FETCH_S, SAY_EVERY_S = 10.0, 2.0, 30.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
ACK_WAIT_S = 3.0
"""An event that was begun by a process that died is handed out again after this."""
SLACK_CHARS = 3000
NAME = "[a-z0-9-]{1,63}"


class Rejected(ValueError):
    """A message that is no event of the job, or a bus that refuses us; the text says why."""


def is_signed(secret: bytes, subject: str, data: bytes, headers: Mapping[str, str]) -> bool:
    """Whether it has the job secret's MAC. Without a secret everything passes."""
    mac = hmac.new(secret, subject.encode() + b"\n" + data, hashlib.sha256).hexdigest()
    return not secret or hmac.compare_digest(mac, headers.get("Trainmover-Mac", ""))


def cloudevent(secret: bytes, message: Msg) -> Document:
    """The event in CloudEvents' JSON format; on the bus its attributes are headers."""
    headers = message.headers or {}
    if not is_signed(secret, message.subject, message.data, headers):
        raise Rejected("not signed with the job's secret")
    document = {k.removeprefix("ce-"): v for k, v in headers.items() if k.startswith("ce-")}
    if missing := {"specversion", "id", "source", "type"} - document.keys():
        raise Rejected(f"expected a CloudEvent, came one without {', '.join(sorted(missing))}")
    trace = {"traceparent": headers["traceparent"]} if "traceparent" in headers else {}
    try:
        return {**document, **trace, "data": json.loads(message.data)}
    except ValueError as error:
        raise Rejected(f"expected JSON, came {message.data[:80]!r}") from error


def slack(document: Document) -> Document:
    kind = document["type"].removeprefix("trainmover.").rpartition(".")[0]
    try:
        data = {k: ", ".join(v) if k == "workers" else v for k, v in document["data"].items()}
        return {"text": f"{data['job']}: {SENTENCES[kind].format(**data)}"[:SLACK_CHARS]}
    except (AttributeError, LookupError, TypeError) as error:
        raise Rejected(f"expected the fields of {kind}, came {document['data']}") from error


FORMATS: dict[str, tuple[str, Callable[[Document], Document]]] = {
    "cloudevents": ("application/cloudevents+json", lambda document: document),
    "slack": ("application/json", slack),
}


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """urllib follows a redirection with a GET, whose 200 would look like a receipt."""

    def redirect_request(self, *_: object) -> None:
        return None


def post(url: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, str]:
    """Status (0: no answer) and what was said. Blocks, for at most POST_S without a byte."""
    request = urllib.request.Request(url, body, dict(headers), method="POST")
    try:
        with urllib.request.build_opener(NoRedirect).open(request, timeout=POST_S) as response:
            return response.status, response.reason
    except urllib.error.HTTPError as error:
        error.close()
        return error.code, error.reason
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error) or type(error).__name__


class Alerter:
    """From the bus to the webhook, until `stopping` is set."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.stream = f"TRAINMOVER_{args.job}"
        self.stopping = asyncio.Event()
        self.posted = self.given_up = 0
        self._client = Client()
        self._js: JetStreamContext = self._client.jetstream(timeout=FETCH_S)
        self._last_done = ""
        """Id of the event posted or given up last: if it comes again it is only acknowledged."""
        self._said: dict[str, float] = {}

    async def run(self) -> None:
        """Raises Rejected for a wrong secret."""
        try:
            if await self._connect() and await self._succeeds(self._check_secret):
                log.info("listening for %s", ", ".join(self.args.types))
                events = await self._js.pull_subscribe_bind(self.args.name, self.stream)
                # Declared again after every silence: a bus that lost its disk has forgotten it.
                while await self._succeeds(self._declare):
                    with suppress(nats.errors.Error, TimeoutError):
                        while not self.stopping.is_set():
                            await self._alert(*await events.fetch(1, timeout=FETCH_S))
        finally:
            await self._client.close()

    async def _connect(self) -> bool:
        """Waits for the server. False: asked to stop."""
        where = self.args.bus.rpartition("@")[2]  # what stands before is secret

        async def say(error: Exception) -> None:
            self._say(f"no connection to {where}, trying on: {error or type(error).__name__}")

        connecting = asyncio.ensure_future(
            self._client.connect(
                self.args.bus,
                error_cb=say,
                max_reconnect_attempts=-1,
                reconnect_time_wait=FIRST_WAIT_S,  # type: ignore[arg-type]  # any number of seconds
                connect_timeout=2,
                ping_interval=5,
            )
        )
        asked = asyncio.ensure_future(self.stopping.wait())
        await asyncio.wait((connecting, asked), return_when=asyncio.FIRST_COMPLETED)
        for left in (connecting, asked):
            left.cancel()
        return not self.stopping.is_set() and connecting.result() is None

    async def _succeeds(self, call: Callable[[], Awaitable[None]]) -> bool:
        """Repeats a request to JetStream until it is granted, saying why. False: asked to stop."""
        while not self.stopping.is_set():
            try:
                await call()
                return True
            except nats.errors.ConnectionClosedError as error:
                raise Rejected(
                    f"the bus closed the connection: {self._client.last_error}"
                ) from error
            except nats.js.errors.NotFoundError:
                self._say(f"no job {self.args.job} on this bus yet; waiting for it")
            except nats.js.errors.ServiceUnavailableError:
                self._say("JetStream does not answer: is the server started with -js?")
            except (nats.errors.Error, TimeoutError) as error:
                self._say(f"the bus does not answer, trying on: {error or type(error).__name__}")
            await self._stops_within(FIRST_WAIT_S)
        return False

    async def _check_secret(self) -> None:
        """Raises Rejected unless the job was submitted with our secret."""
        subject = f"trainmover.{self.args.job}.job.submitted.v1"
        first = await self._js.get_last_msg(self.stream, subject)
        headers = first.headers or {}
        unasked = "Trainmover-Mac" in headers and not self.args.secret
        if unasked or not is_signed(self.args.secret, subject, first.data or b"", headers):
            raise Rejected(
                f"the events of job {self.args.job} are signed with another secret: set"
                " TRAINMOVER_SECRET to that of the job"
            )

    async def _declare(self) -> None:
        """Our place in the stream: made the first time, found again later.

        Only one message is handed out until it is acknowledged: that keeps them in order.
        """
        place = ConsumerConfig(
            name=self.args.name,
            durable_name=self.args.name,
            filter_subjects=[f"trainmover.{self.args.job}.{t}.v1" for t in self.args.types],
            deliver_policy=DeliverPolicy.ALL,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=ACK_WAIT_S,
            max_ack_pending=1,
        )
        await self._js.add_consumer(self.stream, place)

    async def _alert(self, message: Msg) -> None:
        """Post it, and tell the bus that it is done."""
        keeping = asyncio.ensure_future(self._keep(message))
        try:
            document = cloudevent(self.args.secret, message)
            if document["id"] != self._last_done and not await self._post(document):
                await message.nak()  # to be handed out again at once
                return
            self._last_done = document["id"]
        except Rejected as why:
            seq = message.metadata.sequence.stream
            log.error("not posted: seq %d, %s: %s", seq, message.subject, why)
        finally:
            keeping.cancel()
        await message.ack_sync()  # if this does not arrive, it comes again and is only acknowledged

    async def _post(self, document: Document) -> bool:
        """Until the receiver has it or it is given up. False: asked to stop before."""
        kind, form = FORMATS[self.args.format]
        headers = {"Content-Type": kind, "Idempotency-Key": document["id"]}
        body, what = json.dumps(form(document)).encode(), document["id"]
        refusals, wait_s = 0, FIRST_WAIT_S
        while True:
            status, said = await asyncio.to_thread(post, self.args.url, body, headers)
            if 200 <= status < 300:
                self.posted += 1
                log.info("posted: %s: %d %s", what, status, said)
                return True
            refusals += 300 <= status < 500 and status not in AGAIN
            if refusals >= self.args.give_up_after:
                self.given_up += 1
                log.error("GIVEN UP: %d %s: %s", status, said, json.dumps(document))
                return True
            log.warning("again in %g s: %s: %d %s", wait_s, what, status, said)
            if await self._stops_within(wait_s):
                return False
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _keep(self, message: Msg) -> None:
        """Says that somebody works on it, so that the bus does not hand it out again."""
        while True:
            await asyncio.sleep(ACK_WAIT_S / 3)
            with suppress(nats.errors.Error):
                await message.in_progress()

    async def _stops_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self.stopping.wait()
        return False

    def _say(self, what: str) -> None:
        """The same again only after 30 s."""
        if time.monotonic() > self._said.get(what, -math.inf) + SAY_EVERY_S:
            self._said[what] = time.monotonic()
            log.info(what)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known, default = ", ".join(SENTENCES), ",".join(DEFAULT_TYPES)
    flag = parser.add_argument
    bus, job, url = (
        os.environ.get(n, "") for n in ("TRAINMOVER_BUS", "TRAINMOVER_JOB", "ALERT_URL")
    )
    flag("--bus", default=bus, metavar="URL", help="nats://token@host:4222, or TRAINMOVER_BUS")
    flag("--job", default=job, metavar="NAME", help="or TRAINMOVER_JOB")
    flag("--url", default=url, help="of the webhook, or ALERT_URL")
    flag("--format", choices=FORMATS, default="cloudevents", help="default: CloudEvents 1.0, JSON")
    flag("--types", default=default, metavar="A,B", help=f"of {known}; default: {default}")
    flag("--name", default="alerts", help="of the place on the bus; default: alerts")
    flag("--give-up-after", type=int, default=10, metavar="N", help="refusals; default: 10")
    args = parser.parse_args(words)
    args.types = args.types.split(",")
    http_url = r"https?://([^/@]*@)?([^/:]+|\[[^]]+\])(:\d+)?(/.*)?"
    nats_url = "nats://host:port or tls://..."
    for fits, expected, came in (
        (set(args.types) <= SENTENCES.keys(), f"--types: expected some of {known}", args.types),
        (re.fullmatch(http_url, args.url), "--url or ALERT_URL: expected http(s)://...", args.url),
        (re.match("(nats|tls)://.", args.bus), f"--bus: expected {nats_url}", args.bus),
        (re.fullmatch(NAME, args.job), f"--job: expected {NAME}", args.job),
        (re.fullmatch(NAME, args.name), f"--name: expected {NAME}", args.name),
        (args.give_up_after > 0, "--give-up-after: expected 1 or more", args.give_up_after),
    ):
        if not fits:
            parser.error(f"{expected}, got {came!r}")
    try:
        args.secret = bytes.fromhex(os.environ.get("TRAINMOVER_SECRET", ""))
    except ValueError:
        parser.error("TRAINMOVER_SECRET: expected hex digits")
    return args


async def main(args: argparse.Namespace) -> int:
    alerter = Alerter(args)
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, alerter.stopping.set)
    try:
        await alerter.run()
    except Rejected as why:
        log.error("%s", why)
        return 2
    log.info("ended: %d posted, %d given up", alerter.posted, alerter.given_up)
    return 1 if alerter.given_up else 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("nats").setLevel(logging.CRITICAL)  # its errors come to us
    sys.exit(asyncio.run(main(parse())))
