"""The bus thread of a worker: commands in, answers out; nothing else rides on this connection.

The training thread never waits for it but for objects (tapes, in set-up), and it never waits for
the training thread longer than `ANSWER_WITHIN_S`: an answer says where the worker is, the mover
asks again.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog

from trainmover.bus.job import JobBus
from trainmover.bus.nats import connect
from trainmover.runtime.attempt import Attempt, spans_of
from trainmover.runtime.commit import Phase
from trainmover.runtime.links import Links
from trainmover.runtime.seat import Seat
from trainmover.schemas.commands import (
    ANSWER_WITHIN_S,
    Answer,
    AnyCommand,
    Collect,
    Decided,
    Drop,
    Freeze,
    Prepare,
    Pull,
    Resume,
    Retire,
    Stage,
    StandBy,
    Switch,
)
from trainmover.schemas.environment import WorkerEnvironment
from trainmover.schemas.trace import trace_id
from trainmover.telemetry.spans import Tracer

log = structlog.get_logger()

T = TypeVar("T")

CONNECT_S = 30.0


class Control:
    """Owns one thread with one event loop; `start` returns when commands can arrive."""

    def __init__(self, env: WorkerEnvironment, links: Links, tracer: Tracer) -> None:
        self._env, self._links, self._tracer = env, links, tracer
        self.seat = Seat(env.worker, self._wake)
        self.seat.over = self._trace
        self._bus: JobBus | None = None
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._waiters = 0
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="tm-control", daemon=True)

    def start(self) -> None:
        """Blocks until the worker listens for commands. Raises what kept it from that."""
        self._thread.start()
        self._started.wait(CONNECT_S + 5)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Leave the bus; blocks for two seconds at most."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=2)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()
            self._loop.close()

    async def _serve(self) -> None:
        env = self._env
        bus = self._bus = JobBus(
            await connect(env.bus, env.job, deadline_s=CONNECT_S),
            job=env.job,
            run=env.run,
            source=f"worker/{env.worker}",
            secret=bytes.fromhex(env.secret),
        )
        await bus.answer(env.worker, self._handle)
        self._started.set()
        await self._stop.wait()
        await bus.close()

    # ---- objects, for the training thread

    def put(self, name: str, data: bytes, within_s: float) -> None:
        """Store an object of the job. Blocks. Raises BusError; TimeoutError after `within_s`."""
        assert self._bus is not None, "the control thread was not started"
        self._await(self._bus.put(name, data), within_s)

    def get(self, name: str, within_s: float) -> bytes:
        """An object of the job. Blocks. Raises BusError; TimeoutError after `within_s`."""
        assert self._bus is not None, "the control thread was not started"
        return self._await(self._bus.get(name), within_s)

    def _await(self, call: Coroutine[Any, Any, T], within_s: float) -> T:
        async def within() -> T:
            async with asyncio.timeout(within_s):
                return await call

        return asyncio.run_coroutine_threadsafe(within(), self._loop).result(within_s + 1)

    def soon(self, call: Callable[[], None]) -> None:
        """Have this thread do it. Takes no lock: a signal handler may."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    # ---- commands

    async def _handle(self, command: AnyCommand) -> Answer:
        seat = self.seat
        match command:
            case StandBy():
                seat.told_to_stand_by(command)
                await self._until(lambda: seat.set_up)
            case Prepare():
                seat.plan(command)
                await self._until(lambda: seat.ahead.due is None)
            case Freeze():
                seat.plan(command)
                await self._until(lambda: self._stopped(command))
            case Drop():
                seat.drop(command)
                await asyncio.to_thread(self._links.drop, command)
            case Collect():
                return await asyncio.to_thread(seat.collect, command, self._links.end)
            case Decided():
                await self._obeyed(command, Stage.OBEYED)
            case Pull():
                await self._obeyed(command, Stage.RESTORED)
            case Switch():
                await self._obeyed(command, Stage.SWITCHED)
            case Resume():
                if seat.order(command):
                    await self._until(lambda: self._resumed(command))
            case Retire():
                seat.retire(command)
                self._links.retire()
        return seat.answer()

    async def _obeyed(self, command: Decided | Pull | Switch, stage: Stage) -> None:
        if self.seat.order(command):
            await self._until(lambda: self.seat.stage >= stage or bool(self.seat.refused))

    def _stopped(self, command: Freeze) -> bool:
        p = self.seat.position
        stopped = p.phase is Phase.FROZEN and p.freeze == command.generation
        return stopped or p.ended or p.phase is Phase.DONE

    def _resumed(self, command: Resume) -> bool:
        answer = self.seat.answer()
        past = answer.committed > command.target or answer.done
        return (answer.running == command.generation and past) or bool(answer.refused)

    # ---- waking

    async def _until(self, reached: Callable[[], bool]) -> None:
        deadline = self._loop.time() + ANSWER_WITHIN_S
        self._waiters += 1
        try:
            while not reached():
                left = deadline - self._loop.time()
                if left <= 0:
                    return
                self._changed.clear()
                if reached():
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), left)
        finally:
            self._waiters -= 1

    # ---- what is told of it

    def facts(self) -> dict[str, object]:
        """For log lines: rank, generation, and the trace of the incident under way.

        Without the lock: what is read may be a moment old.
        """
        role, incident = self.seat.role, self.seat.incident
        facts: dict[str, object] = {"generation": self.seat.position.generation}
        if role is not None and role.generation:
            facts["rank"] = role.rank
        if incident:
            facts["trace_id"] = trace_id(self._env.run, incident)
        return facts

    def _trace(self, attempt: Attempt) -> None:
        """Called from any thread; the spans are written in this one, never in the training's."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._emit, attempt)

    def _emit(self, attempt: Attempt) -> None:
        for span in spans_of(self._env.run, attempt):
            self._tracer.emit(span)

    def _wake(self) -> None:
        """Called from any thread, often: costs nothing while no command waits."""
        if self._waiters:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._changed.set)
