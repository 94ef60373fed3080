"""What a worker does between the end of one generation and the start of the next.

Runs at a block boundary in the training thread, or in the caretaker once the loop is over:
obey the decision, pull what is missing, switch links, put extras at the buddies, resume. Each
piece is asked for by the mover and may be cut short by a newer plan.
"""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import structlog

from trainmover.runtime import commit
from trainmover.runtime.commit import Phase, ProtocolError
from trainmover.runtime.endpoint import Connection
from trainmover.runtime.fence import Cancellation, Revoked
from trainmover.runtime.link import LinkBroken
from trainmover.runtime.links import Links
from trainmover.runtime.loop import Loop
from trainmover.runtime.seat import Role, Seat
from trainmover.runtime.tracked import Tracked
from trainmover.runtime.transfer import extras
from trainmover.runtime.transfer.donor import serve
from trainmover.runtime.transfer.extras import pull_extras
from trainmover.runtime.transfer.pulled import Pulled, together
from trainmover.runtime.transfer.puller import SILENCE_S, pull
from trainmover.runtime.transfer.wire import TransferError
from trainmover.runtime.vote import Vote
from trainmover.runtime.wire import Refused
from trainmover.schemas.commands import Bundle, Decided, Prepare, Pull, Resume, Stage, Switch
from trainmover.schemas.member import Member

log = structlog.get_logger()

PULL_S = 600.0
DIAL_S = 10.0
SWITCH_S = 30.0
REBUDDY_S = 30.0
SAY_EVERY_S = 10.0


FAILURES = (
    Revoked,
    LinkBroken,
    TimeoutError,
    OSError,
    ValueError,
    ProtocolError,
    TransferError,
    Refused,
)
"""What can keep a piece from being done; anything else is a bug and ends the worker."""


def joiner_role(command: Decided | Prepare, worker: str) -> Role:
    """What a decision, or a plan, makes of a worker that holds no state yet."""
    return Role(
        rank=next(m.rank for m in command.members if m.worker == worker),
        layout=command.layout,
        generation=command.generation,
        members=command.members,
        placement=command.placement,
    )


class Rerun(BaseException):
    """Unwinds `train`: it runs again from the top, for another rank or another generation."""


class Retired(BaseException):
    """Unwinds `train`: this worker is not needed any more."""


class Recovery:
    """Per role: the tracked state and the vote are those of this run of `train`."""

    def __init__(
        self,
        seat: Seat,
        links: Links,
        tracked: Tracked,
        vote: Vote,
        loop: Loop,
        rebind: Callable[[Role], bool],
    ) -> None:
        self._seat, self._links, self._tracked, self._vote = seat, links, tracked, vote
        self._loop, self._rebind = loop, rebind

    def stand_frozen(self) -> None:
        """Blocks until the switch is decided (`park` is next) or dropped. Raises Retired."""
        seat = self._seat
        while not seat.wait(
            lambda: (
                seat.retired is not None
                or seat.position.phase is not Phase.FROZEN
                or seat.position.ended
            ),
            SAY_EVERY_S,
        ):
            log.warning("frozen.waits", generation=seat.position.freeze, for_what="the mover")
        if seat.retired is not None:
            raise Retired(seat.retired)

    def park(self) -> None:
        """Blocks until the mover resumes this worker. Raises Rerun or Retired."""
        while True:
            work = self._next()
            try:
                match work:
                    case Prepare():
                        self._prepare(work)
                    case Decided():
                        self._obey(work)
                    case Pull():
                        self._pull(work)
                    case Switch():
                        self._switch(work)
                    case Resume():
                        if self._resume(work):
                            return
            except FAILURES as error:
                tell = log.info if isinstance(error, Revoked) else log.warning
                tell("recovery.failed", doing=work.kind, error=str(error))
                if isinstance(work, Prepare):
                    self._seat.cannot_prepare(work.generation, str(error))
                else:
                    self._seat.refuse(work.generation, f"{work.kind}: {error}")

    # ---- which piece is next

    def _next(self) -> Prepare | Decided | Pull | Switch | Resume:
        while not self._seat.wait(self._is_due, SAY_EVERY_S):
            with self._seat.cond:
                if self._seat.position.phase is not Phase.EMPTY:
                    about, stage = self._seat.orders.about, self._seat.stage
                    log.warning("recovery.waits", generation=about, reached=stage.name)
        with self._seat.cond:
            if self._seat.retired is not None:
                raise Retired(self._seat.retired)
            due = self._due()
            if due is None and self._seat.outdated:
                raise Rerun
        assert isinstance(due, Prepare | Decided | Pull | Switch | Resume)
        return due

    def _is_due(self) -> bool:
        return self._due() is not None or self._seat.outdated

    def _due(self) -> Prepare | Decided | Pull | Switch | Resume | str | None:
        """The order that the stage makes next, None while there is none. Lock held."""
        seat, orders = self._seat, self._seat.orders
        if seat.retired is not None:
            return seat.retired
        if seat.ahead.due and seat.position.phase is Phase.EMPTY:
            return seat.ahead.due
        if seat.refused:
            return None
        decided = seat.decided
        if decided and (seat.stage < Stage.OBEYED or decided.setup_again):
            return decided
        if orders.pull and seat.stage == Stage.OBEYED:
            return orders.pull
        if orders.switch and Stage.RESTORED <= seat.stage < Stage.SWITCHED:
            return orders.switch
        if orders.resume and seat.stage == Stage.SWITCHED:
            return orders.resume
        return None

    # ---- the pieces

    def _be(self, wanted: Role) -> None:
        """Stand in its rank, without state yet. Raises Rerun where `train` must run for it."""
        role = self._seat.role
        here = role is not None and role.generation and role.rank == wanted.rank
        if not here and not self._rebind(wanted):
            raise Rerun

    def _prepare(self, command: Prepare) -> None:
        """All that can be done while the others train: set-up for the rank, links opened ahead."""
        self._be(joiner_role(command, self._seat.worker))
        self._links.prepare(command, self._vote.rank, SWITCH_S)
        self._seat.ready_ahead(command.generation)

    def _obey(self, command: Decided) -> None:
        seat = self._seat
        if command.setup_again:
            raise Rerun
        if seat.position.phase is Phase.EMPTY:
            self._be(joiner_role(command, seat.worker))
            seat.reach(Stage.OBEYED, command.generation)
            return
        with seat.cond:
            after = commit.obey(seat.position, command.generation, command.target)
            if after is None or after.phase is not Phase.READY:
                return
            seat.position = after
            seat.shelf.prune(after.kept)
            clean = Stage.OBEYED if after.dirty else Stage.RESTORED
            seat.reach(clean, command.generation)

    def _pull(self, command: Pull) -> None:
        started = time.monotonic()
        pulled = together([self._pull_from(bundle, command) for bundle in command.sources])
        if command.extras_from is not None:
            self._tracked.load_own(self._pull_extras(command))
        with self._seat.cond:
            if self._seat.forget_dirt(command.generation, command.target):
                self._seat.pulled = replace(pulled, seconds=time.monotonic() - started)
                self._seat.reach(Stage.RESTORED, command.generation)

    def _pull_from(self, bundle: Bundle, command: Pull) -> Pulled:
        """Each donor is dialed by threads of its own: a cancellation is looked for between."""
        generation = command.generation

        def dial(member: Member) -> socket.socket:
            return self._dial(member, "state", generation).sock

        return pull(
            {m.worker: partial(dial, m) for m in bundle.donors},
            self._tracked,
            objects=bundle.objects,
            deadline_s=PULL_S,
            silence_s=SILENCE_S,
            check=lambda: self._links.cancellation.check(generation),
        )

    def _pull_extras(self, command: Pull) -> dict[str, bytes]:
        assert command.extras_from is not None
        connection = self._dial(
            command.extras_from, "extras", command.generation, self._links.cancellation
        )
        try:
            return pull_extras(connection.sock, deadline_s=DIAL_S)
        finally:
            connection.close()

    def _dial(
        self,
        member: Member,
        channel: str,
        generation: int,
        cancellation: Cancellation | None = None,
    ) -> Connection:
        return self._links.endpoint.dial(
            member.addresses,
            member.worker,
            channel,
            generation,
            DIAL_S,
            cancellation=cancellation,
        )

    def _switch(self, command: Switch) -> None:
        """REBUDDY: no generation starts before every rank has its extras at its buddies."""
        counters = self._links.switch(command, self._vote.rank, SWITCH_S)
        self._vote.rebuddy(command.target, self._tracked.own(), REBUDDY_S)
        with self._seat.cond:
            self._seat.links = counters
            self._seat.reach(Stage.SWITCHED, command.generation)

    def _resume(self, command: Resume) -> bool:
        seat = self._seat
        with seat.cond:
            if command.total is not None:
                self._loop.end_at(command.total)
            last = command.target >= self._loop.blocks
            after = commit.resume(seat.position, command.generation, command.target, last=last)
            if after is None:
                return False
            self._links.open_data(command.generation)
            seat.position = after
            seat.reach(Stage.RESUMED, command.generation)
            return True


# ---- what others pull from this worker


def serve_state(seat: Seat, tracked: Tracked, connection: Connection) -> None:
    """Donor's side, in the endpoint's thread: the training thread is parked while it is asked."""

    def allowed() -> bool:
        with seat.cond:
            return (
                seat.orders.about == connection.generation
                and Stage.RESTORED <= seat.stage < Stage.RESUMED
                and not seat.position.dirty
            )

    offer = partial(tracked.offers.get, connection.generation)
    with _told_if_cut("state", connection):
        serve(connection.sock, offer, deadline_s=PULL_S, allowed=allowed)
    connection.close()


def serve_extras(seat: Seat, tracked: Tracked, connection: Connection) -> None:
    """The own state, at the decided step, of the rank that the caller takes: its buddy's side, or
    that of the leaver who gives the rank away."""
    with seat.cond:
        decided, role = seat.decided, seat.role
        parts = None
        if decided is not None and decided.generation == connection.generation:
            ranks = [m.rank for m in decided.members if m.worker == connection.peer]
            if ranks and role is not None and role.rank == ranks[0]:
                parts = tracked.own()
            elif ranks:
                parts = seat.shelf.get(ranks[0], decided.target)
    if parts is not None:
        with _told_if_cut("extras", connection):
            extras.serve_extras(connection.sock, parts, deadline_s=DIAL_S)
    connection.close()


@contextmanager
def _told_if_cut(what: str, connection: Connection) -> Iterator[None]:
    """Who pulls may die or be told to stop; that is its plan's business, not the donor's."""
    try:
        yield
    except (OSError, TransferError) as error:
        log.info("recovery.serving_cut", what=what, to=connection.peer, error=str(error))
