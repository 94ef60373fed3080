"""What a worker says: facts and beats to its agent, over one Unix socket, from one thread.

Facts are kept in order and sent again after a reconnect until the agent acknowledges them;
a beat is only ever the latest one.
"""

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import structlog

from trainmover.schemas.base import Event
from trainmover.schemas.local import Acknowledged, Beat, Crash, Fact, Hello

log = structlog.get_logger()

MAX_FACTS = 1024
"""Durable facts that may wait for the bus; a worker makes a handful per incident."""
RETRY_S = 0.2
TRIES_UNTIL_SAID = 10
"""At the end of a job the agent may close first; a real outage is said after two seconds."""


class Reporter:
    """Owned by the worker; `close` joins its threads."""

    def __init__(self, path: str, worker: str, beat_s: float) -> None:
        self._path, self._worker, self._beat_s = path, worker, beat_s
        self._cond = threading.Condition()
        self._facts: deque[Fact] = deque()
        self._unsent: deque[Fact] = deque()
        self._next_id = 1
        self._beat: Callable[[], Beat] = lambda: Beat(worker=worker)
        self._urgent = False
        self._crash: Crash | None = None
        self._closed = False
        self._sock: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="tm-report", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def fact(self, event: Event) -> None:
        """Queue a stored event. Raises RuntimeError when MAX_FACTS wait: the agent is gone."""
        with self._cond:
            if len(self._facts) >= MAX_FACTS:
                raise RuntimeError(f"{MAX_FACTS} facts wait for the agent at {self._path}")
            fact = Fact(
                id=self._next_id,
                type=event.TYPE,
                payload=event.model_dump_json(),
                time=time.time(),
            )
            self._next_id += 1
            self._facts.append(fact)
            self._unsent.append(fact)
            self._cond.notify_all()

    def beat(self, beat: Callable[[], Beat], *, now: bool = False) -> None:
        """What to say next time; made only then, since most beats are overtaken by the next."""
        self._beat = beat  # atomic, so that a step need not take the lock
        if now:
            with self._cond:
                self._urgent = True
                self._cond.notify_all()

    def crash(self, crash: Crash) -> None:
        """The last word before an exception ends the process."""
        with self._cond:
            self._crash = crash
            self._cond.notify_all()

    def flush(self, deadline_s: float) -> bool:
        """Blocks until everything said is at the agent and stored; False after the deadline."""
        with self._cond:
            return self._cond.wait_for(
                lambda: not self._facts and self._crash is None, timeout=deadline_s
            )

    def close(self) -> None:
        with self._cond:
            self._closed = True
            self._cond.notify_all()
            if self._sock:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=2)

    def _run(self) -> None:
        failures = 0
        while not self._closed:
            try:
                self._talk()
                failures = 0
            except OSError as error:
                failures += 1
                if failures == TRIES_UNTIL_SAID:
                    log.warning("agent.unreachable", path=self._path, error=str(error))
            with self._cond:
                self._cond.wait_for(lambda: self._closed, timeout=RETRY_S)

    def _talk(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(self._path)
            with self._cond:
                self._sock = sock
                self._unsent = deque(self._facts)
            reader = threading.Thread(
                target=self._read, args=(sock,), name="tm-report-acks", daemon=True
            )
            reader.start()
            try:
                self._send(sock, Hello(worker=self._worker).model_dump_json())
                last = 0.0
                while not self._closed:
                    last = self._round(sock, last)
            finally:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
                reader.join(timeout=1)

    def _round(self, sock: socket.socket, last: float) -> float:
        """Send what is due; returns when the last beat went out (monotonic seconds)."""
        with self._cond:
            due = max(0.0, last + self._beat_s - time.monotonic())
            self._cond.wait_for(
                lambda: self._closed or self._unsent or self._crash or self._urgent, timeout=due
            )
            facts, crash, beat = list(self._unsent), self._crash, self._beat
            self._unsent.clear()
            self._urgent = False
        for fact in facts:
            self._send(sock, fact.model_dump_json())
        if crash is not None:
            self._send(sock, crash.model_dump_json())
            with self._cond:
                self._crash = None
                self._cond.notify_all()
        self._send(sock, beat().model_dump_json())
        return time.monotonic()

    def _send(self, sock: socket.socket, line: str) -> None:
        sock.sendall(line.encode() + b"\n")

    def _read(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), sock.makefile("rb") as lines:
            for line in lines:
                acknowledged = Acknowledged.model_validate_json(line)
                with self._cond:
                    while self._facts and self._facts[0].id <= acknowledged.id:
                        self._facts.popleft()
                    self._cond.notify_all()
