"""From the end of one generation to the start of the next, in whatever order the orders come."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import permutations
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from tests.unit.linked_ranks import WITHIN_S, switch
from tests.unit.one_rank import OneRank, decided

from trainmover.runtime.commit import Phase, Position
from trainmover.runtime.endpoint import Connection
from trainmover.runtime.loop import Loop
from trainmover.runtime.recovery import Recovery, Rerun, Retired, serve_extras, serve_state
from trainmover.runtime.seat import Role
from trainmover.runtime.tracked import Tracked
from trainmover.runtime.transfer.extras import pull_extras
from trainmover.runtime.transfer.puller import pull
from trainmover.runtime.transfer.wire import TransferError
from trainmover.runtime.vote import Vote
from trainmover.schemas.commands import (
    Collect,
    Decided,
    Drop,
    Prepare,
    Pull,
    Resume,
    Stage,
    Switch,
)
from trainmover.schemas.layout import Layout
from trainmover.schemas.member import Member


class Parked:
    """A rank between two blocks with two of nine steps committed, and the mover's orders."""

    def __init__(self, one: OneRank) -> None:
        self.one, self.seat = one, one.seat
        one.links.renew(("m0",))
        vote = Vote(one.seat, one.links.control, one.links.control_fence, 0, ("m0",))
        self.seat.position = Position(generation=1, phase=Phase.COMPUTING, committed=2, extras=2)
        self.rebinds: list[Role] = []
        self.rebindable = False
        self.tracked = Tracked()
        self.tracked.add(model=torch.nn.Linear(2, 1))
        self.recovery = Recovery(
            one.seat, one.links, self.tracked, vote, Loop(total=9), self._rebind
        )

    def _rebind(self, role: Role) -> bool:
        self.rebinds.append(role)
        if self.rebindable:
            self.seat.role = role
        return self.rebindable

    def collect(self, generation: int) -> None:
        self.seat.collect(Collect(generation=generation, assignment="x"), self.one.links.end)

    def orders(self, generation: int, target: int = 2) -> tuple[Decided, Switch, Resume]:
        command = switch(generation, self.one.members, target)
        return (
            decided(generation, command, target),
            command,
            Resume(generation=generation, target=target),
        )

    def parked_until(self, what: Callable[[], bool]) -> str:
        """Parks until `what` holds, then retires; returns what the rank answers at that moment."""
        seen: list[str] = []

        def watch() -> None:
            assert self.seat.wait(what, WITHIN_S)
            seen.append(self.seat.answer().refused)
            self.one.retire()

        watcher = threading.Thread(target=watch)
        watcher.start()
        with pytest.raises(Retired, match="test"):
            self.recovery.park()
        watcher.join(WITHIN_S)
        return seen[0]


@pytest.fixture
def parked(one: OneRank) -> Parked:
    return Parked(one)


# ---- a rank that has its state


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_clean_rank_resumes_whatever_order_its_orders_come_in(
    parked: Parked, order: tuple[int, ...]
) -> None:
    parked.collect(2)
    commands = parked.orders(2)
    for i in order:
        parked.seat.order(commands[i])
    parked.recovery.park()
    assert parked.seat.stage is Stage.RESUMED
    assert (parked.seat.position.generation, parked.seat.position.phase) == (2, Phase.COMPUTING)
    parked.one.links.data_fence.check(2)
    parked.one.links.control_fence.check(2)


def test_orders_of_an_older_plan_are_not_obeyed(parked: Parked) -> None:
    parked.collect(2)
    for command in parked.orders(2):
        parked.seat.order(command)
    parked.collect(3)
    for command in parked.orders(2):
        assert not parked.seat.order(command)
    for command in parked.orders(3):
        parked.seat.order(command)
    parked.recovery.park()
    assert parked.seat.position.generation == 3


def test_a_decision_that_no_correct_mover_makes_is_refused_with_the_reason(
    parked: Parked,
) -> None:
    parked.collect(2)
    parked.seat.order(parked.orders(2, target=4)[0])
    with capture_logs():
        refused = parked.parked_until(lambda: bool(parked.seat.refused))
    assert refused.startswith("decided: generation 2 continues from 4 committed steps")


def test_a_switch_that_fails_is_refused_until_the_next_plan(parked: Parked) -> None:
    gone = Member(rank=1, worker="gone", machine="m1", addresses=("tcp:127.0.0.1:1",))
    parked.collect(2)
    decision, command, resume = parked.orders(2)
    control = parked.one.links.control
    control.register("other", {(0, 1)})
    command = command.model_copy(update={"members": (*command.members, gone)})
    for each in (decision, command, resume):
        parked.seat.order(each)
    refusals: list[str] = []

    def plan_again() -> None:
        assert parked.seat.wait(lambda: bool(parked.seat.refused), WITHIN_S)
        refusals.append(parked.seat.answer().refused)
        control._channels.pop("other")
        parked.collect(3)
        for each in parked.orders(3):
            parked.seat.order(each)

    watcher = threading.Thread(target=plan_again)
    watcher.start()
    with capture_logs() as logs:
        parked.recovery.park()
    watcher.join(WITHIN_S)
    assert [log["event"] for log in logs] == ["recovery.failed"]  # not tried again by itself
    assert refusals[0].startswith("switch: expected worker gone to answer")
    assert parked.seat.answer().refused == ""
    assert parked.seat.position.generation == 3


def test_a_dirty_rank_waits_for_the_state_of_a_donor(parked: Parked) -> None:
    parked.seat.position = Position(
        generation=1, phase=Phase.ENDED, committed=2, extras=2, dirty=True
    )
    parked.collect(2)
    for command in parked.orders(2):
        parked.seat.order(command)
    parked.parked_until(lambda: parked.seat.stage is Stage.OBEYED)
    assert parked.seat.position.dirty
    assert parked.seat.stage is Stage.OBEYED


def test_a_rank_whose_job_ended_at_the_target_is_done_again(parked: Parked) -> None:
    parked.seat.position = Position(generation=1, phase=Phase.DONE, committed=9, extras=9)
    parked.collect(2)
    for command in parked.orders(2, target=9):
        parked.seat.order(command)
    parked.recovery.park()
    assert parked.seat.position.phase is Phase.DONE


def test_set_up_again_unwinds_train(parked: Parked) -> None:
    parked.collect(2)
    decision = parked.orders(2)[0].model_copy(update={"setup_again": True})
    parked.seat.order(decision)
    with pytest.raises(Rerun):
        parked.recovery.park()


# ---- a rank that stands frozen


def frozen(parked: Parked) -> None:
    parked.seat.position = Position(
        generation=1, phase=Phase.FROZEN, committed=2, extras=2, freeze=2, promised=1
    )


def test_who_stands_frozen_goes_on_when_the_plan_is_dropped(parked: Parked) -> None:
    frozen(parked)
    dropped = threading.Thread(target=parked.seat.drop, args=(Drop(generation=2, reason=""),))
    dropped.start()
    parked.recovery.stand_frozen()
    dropped.join(WITHIN_S)
    assert parked.seat.position.phase is Phase.COMPUTING


def test_who_stands_frozen_resumes_from_the_same_step_in_the_next_generation(
    parked: Parked,
) -> None:
    frozen(parked)
    collected = threading.Thread(target=parked.collect, args=(2,))
    collected.start()
    parked.recovery.stand_frozen()
    collected.join(WITHIN_S)
    for command in parked.orders(2):
        parked.seat.order(command)
    parked.recovery.park()
    p = parked.seat.position
    assert (p.generation, p.phase, p.committed, p.freeze) == (2, Phase.COMPUTING, 2, 0)


def test_who_stands_frozen_leaves_when_it_is_retired(parked: Parked) -> None:
    frozen(parked)
    parked.one.retire()
    with pytest.raises(Retired, match="test"):
        parked.recovery.stand_frozen()


# ---- a standby that gets a rank


def prepare(parked: Parked, members: tuple[Member, ...]) -> Prepare:
    return Prepare(
        generation=2,
        layout=Layout.parse("dp=2"),
        members=members,
        placement=("m0", "m1"),
        joiners=(0,),
    )


def test_a_joiner_is_set_up_for_its_rank_before_anything_is_decided(parked: Parked) -> None:
    standby(parked, 1)
    parked.seat.plan(prepare(parked, parked.one.members))
    with pytest.raises(Rerun):
        parked.recovery.park()
    assert [(role.rank, role.generation) for role in parked.rebinds] == [(0, 2)]
    parked.rebindable = True
    parked.parked_until(lambda: parked.seat.answer().prepared == 2)
    p = parked.seat.position
    assert (p.phase, p.promised, parked.seat.orders.about) == (Phase.EMPTY, 0, 0)


def test_a_joiner_that_cannot_open_its_links_says_why_and_stays_a_standby(parked: Parked) -> None:
    standby(parked, 1)
    parked.rebindable = True
    parked.one.links.control.register("other", {(0, 1)})
    gone = Member(rank=1, worker="gone", machine="m1", addresses=("tcp:127.0.0.1:1",))
    parked.seat.plan(prepare(parked, (*parked.one.members, gone)))
    with capture_logs():
        parked.parked_until(lambda: bool(parked.seat.answer().prepare_error))
    assert "expected worker gone to answer" in parked.seat.answer().prepare_error
    assert parked.seat.answer().refused == ""


def standby(parked: Parked, rank: int) -> None:
    parked.seat.position = Position()
    parked.seat.role = Role(rank, Layout.parse("dp=2"), 0)


def test_a_standby_that_gets_a_rank_runs_train_again(parked: Parked) -> None:
    standby(parked, 0)
    parked.collect(2)
    parked.seat.order(parked.orders(2)[0])
    with pytest.raises(Rerun):
        parked.recovery.park()
    assert [role.rank for role in parked.rebinds] == [0]


def test_a_standby_that_can_be_rebound_goes_on_and_pulls(parked: Parked) -> None:
    standby(parked, 1)
    parked.rebindable = True
    parked.collect(2)
    parked.seat.order(parked.orders(2)[0])
    parked.parked_until(lambda: parked.seat.stage is Stage.OBEYED)
    assert parked.seat.role is parked.rebinds[0]
    assert (parked.rebinds[0].rank, parked.rebinds[0].generation) == (0, 2)


def test_a_joiner_whose_donor_cannot_be_reached_refuses_and_asks_for_another(
    parked: Parked,
) -> None:
    standby(parked, 0)
    parked.rebindable = True
    parked.collect(2)
    parked.seat.order(parked.orders(2)[0])
    donor = Member(rank=1, worker="gone", machine="m1", addresses=("tcp:127.0.0.1:1",))
    parked.seat.order(Pull(generation=2, target=2, donor=donor, extras_from=None))
    with capture_logs():
        refused = parked.parked_until(lambda: bool(parked.seat.refused))
    assert refused.startswith("pull: expected worker gone to answer for channel state")
    assert parked.seat.position.phase is Phase.EMPTY


# ---- what others pull


@contextmanager
def asked(peer: str, generation: int) -> Iterator[tuple[Connection, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield Connection(ours, peer, "extras", generation), theirs
    ours.close()
    theirs.close()


def served(
    serve: Callable[[Connection], None],
    take: Callable[[socket.socket], Any],
    peer: str,
    generation: int = 2,
) -> Any:
    """What `take` gets, or the error it meets."""
    with asked(peer, generation) as (connection, sock):
        thread = threading.Thread(target=serve, args=(connection,))
        thread.start()
        try:
            return take(sock)
        except (TransferError, OSError) as error:
            return error
        finally:
            thread.join(WITHIN_S)


@pytest.fixture
def buddy(parked: Parked) -> Parked:
    """Keeps two versions of rank 0's extras, and knows that its new worker goes on from 2."""
    parked.seat.shelf.put(0, 1, {"vars": b"1"}, full=True)
    parked.seat.shelf.put(0, 2, {"vars": b"2"}, full=True)
    parked.collect(2)
    parked.seat.order(parked.orders(2)[0])
    return parked


def extras(buddy: Parked, peer: str, generation: int = 2) -> Any:
    return served(
        lambda connection: serve_extras(buddy.seat, buddy.tracked, connection),
        lambda sock: pull_extras(sock, deadline_s=WITHIN_S),
        peer,
        generation,
    )


def test_a_joiner_gets_the_extras_of_its_rank_at_the_decided_step(buddy: Parked) -> None:
    assert extras(buddy, "w0") == {"vars": b"2"}


def test_nobody_else_gets_them(buddy: Parked) -> None:
    assert isinstance(extras(buddy, "w7"), TransferError | OSError)
    assert isinstance(extras(buddy, "w0", generation=3), TransferError | OSError)


def test_extras_are_not_served_before_a_decision(parked: Parked) -> None:
    parked.seat.shelf.put(0, 2, {"vars": b"2"}, full=True)
    assert isinstance(extras(parked, "w0"), TransferError | OSError)


def test_a_joiner_gets_the_own_state_of_the_leaver_itself(buddy: Parked) -> None:
    buddy.tracked.vars["samples"] = 7
    buddy.seat.role = Role(0, Layout.parse("dp=2"), 1)
    got = extras(buddy, "w0")
    assert got == buddy.tracked.own()
    assert got != {"vars": b"2"}


def test_who_holds_another_rank_gives_what_it_keeps_as_a_buddy(buddy: Parked) -> None:
    buddy.seat.role = Role(1, Layout.parse("dp=2"), 1)
    assert extras(buddy, "w0") == {"vars": b"2"}


def state(donor: Parked) -> Any:
    joiner = Tracked()
    joiner.add(model=torch.nn.Linear(2, 1))
    return served(
        lambda connection: serve_state(donor.seat, donor.tracked, connection),
        lambda sock: pull({"w1": lambda: sock}, joiner, deadline_s=WITHIN_S),
        "w0",
    )


@pytest.mark.parametrize(
    ("stage", "dirty", "serves"),
    [
        (Stage.OBEYED, False, False),
        (Stage.RESTORED, False, True),
        (Stage.SWITCHED, False, True),
        (Stage.RESUMED, False, False),
        (Stage.RESTORED, True, False),
    ],
)
def test_only_a_clean_rank_that_is_parked_at_the_target_is_a_donor(
    parked: Parked, stage: Stage, dirty: bool, serves: bool
) -> None:
    parked.collect(2)
    parked.seat.stage = stage
    parked.seat.position = Position(phase=Phase.READY, committed=2, promised=2, dirty=dirty)
    pulled = state(parked)
    assert isinstance(pulled, TransferError | OSError) is not serves
    if serves:
        assert pulled.digest == pulled.donor_digest == parked.tracked.shared_digest()


def test_a_joiner_that_dies_while_it_pulls_does_not_hurt_its_donor(parked: Parked) -> None:
    parked.collect(2)
    parked.seat.stage = Stage.RESTORED

    def die(sock: socket.socket) -> None:
        sock.sendall(b"half a request")
        sock.shutdown(socket.SHUT_RDWR)

    with capture_logs() as logs:
        served(lambda connection: serve_state(parked.seat, parked.tracked, connection), die, "w0")
    assert [log["event"] for log in logs] == ["recovery.serving_cut"]
