"""What a rank says while it trains: beats and facts through its agent, warnings on stderr once."""

from collections.abc import Iterable, Mapping
from typing import Any

import structlog

from trainmover.runtime.admission import Issued
from trainmover.runtime.reporting import Reporter
from trainmover.runtime.seat import Seat
from trainmover.schemas.base import Event
from trainmover.schemas.environment import WorkerEnvironment
from trainmover.schemas.events import FaultInjected, PeerLost, StepAborted
from trainmover.schemas.fault import Fault
from trainmover.schemas.local import Beat

log = structlog.get_logger()

MAX_CAUSE = 1000
SELDOM = frozenset({"vote", "step", "shadow"})
"""Phases that come with every step: their beats wait for the interval."""


class News:
    """Speaks for whatever rank the seat has at the moment."""

    def __init__(self, env: WorkerEnvironment, seat: Seat, reporter: Reporter) -> None:
        self._env, self._seat, self._reporter = env, seat, reporter
        self._latest: tuple[str, float, Mapping[str, float]] = ("", 0.0, {})
        self._late_named: set[str] = set()
        self._tail_named = False

    def say(self, model: type[Event], **fields: Any) -> None:
        """A stored event in this worker's name."""
        env = self._env
        self._reporter.fact(model(job=env.job, run=env.run, worker=env.worker, **fields))

    def beat(self, phase: str, step_s: float, numbers: Mapping[str, float]) -> None:
        """`numbers` is not changed afterwards."""
        self._latest = phase, step_s, numbers
        self._reporter.beat(self._beat, now=phase not in SELDOM)

    def _beat(self) -> Beat:
        """Where the rank is when the beat goes out: most are overtaken by the next one."""
        phase, step_s, numbers = self._latest
        role, position, loop = self._seat.role, self._seat.position, self._seat.loop
        return Beat(
            worker=self._env.worker,
            rank=role.rank if role and role.generation else None,
            generation=position.generation,
            phase=phase,
            # The closing block is no step.
            committed=min(position.committed, loop.total) if loop else position.committed,
            step_s=step_s,
            numbers=dict(numbers),
        )

    def aborted(self, step: int, cause: str) -> None:
        """RELINK: with nobody dead this leads to a plan for the same workers."""
        self.say(
            StepAborted,
            rank=self._rank,
            generation=self._seat.position.generation,
            step=step,
            cause=cause[:MAX_CAUSE],
        )

    def lost(self, peer: str, generation: int, channel: str, cause: str) -> None:
        self.say(
            PeerLost, peer=peer, generation=generation, channel=channel, cause=cause[:MAX_CAUSE]
        )

    def injected(self, fault: Fault, step: int) -> None:
        """Blocks until it is stored: the fault may be the end of this process."""
        self.say(FaultInjected, kind=fault.kind, rank=self._rank, step=step, at=fault.at)
        self._reporter.flush(deadline_s=2)

    # ---- once each, for who wrote the script

    def late_extras(self, parts: Iterable[str]) -> None:
        if new := set(parts) - self._late_named:
            self._late_named |= new
            log.warning(
                "extras.late",
                parts=sorted(new),
                advice="changed after the optimizer step: each such step waits for its buddies; "
                "draw batches and random numbers before optimizer.step()",
            )

    def collective_in_the_tail(self, issued: Issued) -> None:
        if not self._tail_named:
            self._tail_named = True
            log.warning(
                "collective.after_the_update",
                op=issued.op,
                group=issued.group,
                advice="a rank that is cut off there must take its state from another one, and if "
                "all are, the job ends; communicate before optimizer.step() or use step.report()",
            )

    @property
    def _rank(self) -> int:
        role = self._seat.role
        assert role is not None
        return role.rank
