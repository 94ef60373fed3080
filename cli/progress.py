"""What a person sees of a running job: steps, events of interest, a timeline per incident."""

import asyncio
import contextlib
import time
from collections.abc import Iterable

from trainmover.bus.job import JobBus
from trainmover.cli.console import MARK, Console
from trainmover.cli.incidents import Incident, incidents
from trainmover.cli.timeline import NARROWEST, brief, terminal_width, timeline
from trainmover.cli.waiting import waited_for
from trainmover.cli.words import in_words
from trainmover.schemas.events import (
    InterruptionAnnounced,
    InterruptionCancelled,
    JobCompleted,
    JobFailed,
    JobStalled,
    LayoutAssigned,
    MigrationAborted,
    MigrationCompleted,
    MigrationPlanned,
    PoolExhausted,
    WorkerFailed,
    WorkerSuspected,
)
from trainmover.schemas.local import Beat, Telemetry
from trainmover.schemas.recorded import Recorded

TOLD = (
    LayoutAssigned,
    WorkerFailed,
    WorkerSuspected,
    InterruptionAnnounced,
    InterruptionCancelled,
    MigrationPlanned,
    MigrationAborted,
    PoolExhausted,
    JobStalled,
)
LINE_EVERY_S = 1.0
REMIND_EVERY_S = 30.0
"""While nothing can go on, a person hears why and what would help (invariant 7)."""
WAITING_EVERY_S = 10.0
MAX_RANKS = 8
"""Rows of ranks in what is told of an incident."""
NOT_TRAINING = ("starting", "shadow", "standby")


class Progress:
    """Follows the stream and telemetry of a job, and says on the console what matters."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._beats: dict[str, tuple[Beat, ...]] = {}
        self._told_at, self._told_step = float("-inf"), 0
        self._changed = asyncio.Event()
        self._hushed = False
        self._stalled: JobStalled | None = None
        self._is_stalled = asyncio.Event()
        self.records: list[Recorded] = []

    def incidents(self) -> list[Incident]:
        return incidents(self.records)

    async def follow(self, bus: JobBus) -> None:
        """For ever."""
        await bus.on_telemetry(self.hear)
        async for recorded in bus.follow():
            self.see(recorded)
            self._changed.set()

    async def remind(self) -> None:
        """For ever: says again that the job is stalled, as long as it is."""
        while True:
            await self._is_stalled.wait()
            await asyncio.sleep(REMIND_EVERY_S)
            if self._stalled is not None and not self._hushed:
                self._console.say(f"still stalled: {in_words(self._stalled)}")

    async def say_what_is_waited_for(self, bus: str | None) -> None:
        """Until ranks are assigned: every `WAITING_EVERY_S`, why they are not. `bus`: of others."""
        while True:
            await asyncio.sleep(WAITING_EVERY_S)
            reason = waited_for([r.event for r in self.records], bus)
            if reason is None:
                return
            if not self._hushed:
                self._console.say(reason)

    def hush(self) -> None:
        """Say nothing more: what comes now is the end that a person asked for."""
        self._hushed = True

    async def settled(self, seconds: float) -> None:
        """Blocks until the job's end is seen and no incident is open, at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not (self._ended() and all(i.outcome != "open" for i in self.incidents())):
                    self._changed.clear()
                    await self._changed.wait()

    def see(self, recorded: Recorded) -> None:
        self.records.append(recorded)
        event = recorded.event
        match event:
            case JobStalled():
                self._stalled = event
                self._is_stalled.set()
            case MigrationPlanned() | JobCompleted() | JobFailed():
                self._stalled = None
                self._is_stalled.clear()
            case _:
                pass
        if self._hushed:
            return
        if isinstance(event, TOLD):
            self._console.say(f"{event.TYPE}: {in_words(event)}")
        if isinstance(event, MigrationCompleted):
            ended = [i for i in self.incidents() if i.incident == event.incident]
            self._console.say(_in_short(ended[0]) if ended else in_words(event))

    async def hear(self, telemetry: Telemetry) -> None:
        self._beats[telemetry.machine] = telemetry.workers
        beats = [beat for beats in self._beats.values() for beat in beats]
        ranks = training(beats)
        if self._hushed or not ranks:
            return
        first = max(ranks, key=lambda beat: beat.committed)
        now_s = time.monotonic()
        if self._console.live:
            self._console.status(self._status(first, ranks, beats))
        elif now_s - self._told_at >= LINE_EVERY_S and first.committed > self._told_step:
            self._told_at, self._told_step = now_s, first.committed
            self._console.say(f"step {first.committed}{numbers(first)}")

    def _status(self, first: Beat, ranks: list[Beat], beats: list[Beat]) -> str:
        rate = f", {1 / first.step_s:.1f} steps/s" if first.step_s > 0 else ""
        standbys = sum(beat.phase == "standby" for beat in beats)
        generation = max(beat.generation for beat in ranks)
        return (
            f"step {first.committed}{numbers(first)}{rate} | {len(ranks)} ranks,"
            f" {standbys} standbys parked, generation {generation}"
        )

    def _ended(self) -> bool:
        return any(isinstance(r.event, JobCompleted | JobFailed) for r in self.records)


def _in_short(incident: Incident) -> str:
    """With the rows of all actors where there is room for them."""
    width = terminal_width() - len(MARK)
    return brief(incident, width) if width < NARROWEST else timeline(incident, width, MAX_RANKS)


def training(beats: Iterable[Beat]) -> list[Beat]:
    """Those of workers that do a rank's steps now."""
    return [b for b in beats if b.rank is not None and b.phase not in NOT_TRAINING]


def numbers(beat: Beat) -> str:
    """What the script reports, the loss first."""
    return "".join(f" {name} {value:.4g}" for name, value in _loss_first(beat.numbers.items()))


def _loss_first(numbers: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    return sorted(numbers, key=lambda pair: (pair[0] != "loss", pair[0]))
