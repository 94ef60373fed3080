"""A switch that a newer plan, or the end of the worker, cuts short at whatever it waits for."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.unit.linked_ranks import (
    WITHIN_S,
    Rank,
    World,
    assignment,
    environment,
    live,
    switch,
    world,
)

from trainmover.runtime import commit
from trainmover.runtime.endpoint import Endpoint
from trainmover.runtime.fence import Cancellation, Revoked
from trainmover.runtime.links import Links
from trainmover.runtime.pump import Pump
from trainmover.runtime.topology import ring_edges
from trainmover.schemas.commands import Prepare, Switch
from trainmover.schemas.member import Member

RING = "0-1-2#0"
FOR_EVER_S = 600.0
"""The deadline of what is cut: no test waits for it."""
CUTS: dict[str, Callable[[Links], None]] = {
    "a newer plan": lambda links: links.end(3),
    "the end of the worker": lambda links: links.retire(),
}


@pytest.fixture
def three(tmp_path: Path) -> Iterator[World]:
    """Three ranks, all linked with each other for data and for votes."""
    with world(tmp_path, 3) as made:
        for rank in made.ranks:
            rank.links.data.register(RING, ring_edges((0, 1, 2)))
            rank.links.open_data(1)
        made.all(lambda rank: rank.links.data.connect(RING, WITHIN_S))
        yield made


@contextmanager
def standby(folder: Path, index: int) -> Iterator[Links]:
    """Is to take rank 2."""
    links = Links(environment(folder, index, 3))
    links.renew(("m0", "m1", "m2"))
    links.data.register(RING, ring_edges((0, 1, 2)))
    yield links
    links.end(1 << 31)
    links.close()
    links.data_fence.close()
    links.control_fence.close()
    links.cancellation.close()


def move(three: World, joiner: Links | Member, generation: int) -> Switch:
    """Rank 2 goes to `joiner`."""
    (taken,) = assignment([joiner]) if isinstance(joiner, Links) else (joiner,)
    members = (*three.members[:2], taken.model_copy(update={"rank": 2}))
    return switch(generation, members).model_copy(update={"joiners": (2,)})


def ahead(command: Switch) -> Prepare:
    names = set(Prepare.model_fields) & set(Switch.model_fields) - {"kind"}
    return Prepare.model_validate({name: getattr(command, name) for name in names})


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set as soon as a wait begins that a cancellation is to end."""
    begun = threading.Event()
    poll, run = Cancellation.poll, Pump.run

    def polled(self: Cancellation, *given: Any) -> list[tuple[int, int]]:
        begun.set()
        return poll(self, *given)

    def pumped(self: Pump, *given: Any) -> None:
        begun.set()
        run(self, *given)

    monkeypatch.setattr(Cancellation, "poll", polled)
    monkeypatch.setattr(Pump, "run", pumped)
    return begun


@contextmanager
def listener(*, accepts: bool) -> Iterator[Member]:
    """A worker that is not there: connecting to it hangs, or the handshake does."""
    with socket.socket() as door, socket.socket() as one, socket.socket() as two:
        door.bind(("127.0.0.1", 0))
        door.listen(16 if accepts else 0)
        where = door.getsockname()
        for each in () if accepts else (one, two):
            each.setblocking(False)
            each.connect_ex(where)
        address = f"tcp:127.0.0.1:{where[1]}"
        yield Member(rank=1, worker="w1", machine="m1", addresses=(address,))


# ---- each wait


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("accepts", [False, True], ids=["a connection", "a handshake"])
@pytest.mark.parametrize("what", ["switch", "prepare"])
def test_a_joiner_does_not_wait_for_a_neighbour_that_says_nothing(
    three: World,
    tmp_path: Path,
    waiting: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    accepts: bool,
    cut: str,
) -> None:
    """Rank 0 is there, rank 1 is not."""
    dialed, dial = threading.Event(), Endpoint.dial

    def dialing(self: Endpoint, where: tuple[str, ...], peer: str, *more: Any, **named: Any) -> Any:
        if peer == "w1":
            waiting.clear()
            dialed.set()
        return dial(self, where, peer, *more, **named)

    monkeypatch.setattr(Endpoint, "dial", dialing)
    with standby(tmp_path, 9) as joiner, listener(accepts=accepts) as silent:
        command = move(three, joiner, 2)
        first, _, last = command.members
        command = command.model_copy(update={"members": (first, silent, last)})
        begin: Any = joiner.switch if what == "switch" else joiner.prepare
        told = command if what == "switch" else ahead(command)
        begun = three.pool.submit(begin, told, 2, FOR_EVER_S)
        assert dialed.wait(WITHIN_S)
        assert waiting.wait(WITHIN_S)
        assert not begun.done()
        CUTS[cut](joiner)
        with pytest.raises(Revoked, match="generation 2 is given up"):
            begun.result(WITHIN_S)
        assert not joiner.control.links("control")
        assert not joiner.control._ahead


@pytest.mark.parametrize("cut", CUTS)
def test_stayers_do_not_wait_for_a_joiner_that_never_comes(
    three: World, tmp_path: Path, waiting: threading.Event, cut: str
) -> None:
    with standby(tmp_path, 9) as dead:
        command = move(three, dead, 2)
        stayers = three.ranks[:2]
        for rank in stayers:
            rank.links.end(2)
        waiting.clear()
        begun = three.start(stayers, lambda r: r.links.switch(command, r.rank, FOR_EVER_S))
        assert waiting.wait(WITHIN_S)
        for rank in stayers:
            CUTS[cut](rank.links)
        for each in begun:
            with pytest.raises(Revoked, match="generation 2 is given up"):
                each.result(WITHIN_S)


@pytest.mark.parametrize("cut", CUTS)
def test_a_rank_does_not_wait_for_extras_that_never_come(
    three: World, waiting: threading.Event, cut: str
) -> None:
    command = switch(2, three.members)
    for rank in three.ranks:
        rank.links.end(2)
    three.all(lambda rank: rank.links.switch(command, rank.rank, WITHIN_S))
    first = three.ranks[0]
    waiting.clear()
    (begun,) = three.start([first], lambda r: r.vote.rebuddy(0, r.parts(), FOR_EVER_S))
    assert waiting.wait(WITHIN_S)
    CUTS[cut](first.links)
    with pytest.raises(Revoked):
        begun.result(WITHIN_S)


def test_a_plan_that_was_overtaken_before_its_switch_began_changes_nothing(
    three: World, tmp_path: Path
) -> None:
    links = three.ranks[0].links
    with standby(tmp_path, 9) as joiner:
        links.end(3)
        with pytest.raises(Revoked, match="generation 2 is given up: generation 3 was planned"):
            links.switch(move(three, joiner, 2), 0, FOR_EVER_S)
    assert links.control.link("control", 2).fault is None
    assert links.data.link(RING, 2).fault is None


def test_a_generation_is_not_opened_when_a_newer_one_was_promised_in_its_last_moment(
    three: World,
) -> None:
    links = three.ranks[0].links
    links.end(3)
    for fence in (links.control_fence, links.data_fence):
        with pytest.raises(Revoked, match="generation 2 is given up"):
            fence.open(2)
        assert fence.revoked


def test_a_worker_that_is_retired_goes_on_in_the_generation_that_runs(three: World) -> None:
    for rank in three.ranks:
        rank.links.retire()
        rank.links.data_fence.check(1)
    assert not any(total.failed for total in three.all(Rank.voted))


# ---- what a cut switch leaves


def test_what_was_opened_is_closed_and_what_was_kept_serves_the_next_plan(
    three: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 has a link to the joiner, and waits for rank 1, when the joiner dies."""
    first, second = (rank.links for rank in three.ranks[:2])
    kept = first.control.link("control", 1).identity(), first.data.link(RING, 1).identity()
    with standby(tmp_path, 9) as dies, standby(tmp_path, 8) as joiner:
        command = move(three, dies, 2)
        dies.prepare(ahead(command), 2, WITHIN_S)
        taken, pending = (
            dies.control._ahead[("control", 0), 2].sock,
            dies.data._ahead[(RING, 0), 2].sock,
        )
        door = first.endpoint
        with door._arrived:  # the dialer is answered a moment before
            assert door._arrived.wait_for(lambda: len(door._pending) == 2, WITHIN_S)
        first.end(2)
        opened = threading.Event()
        install = first.control._install

        def installed(*given: Any) -> Any:
            link = install(*given)
            opened.set()
            return link

        monkeypatch.setattr(first.control, "_install", installed)
        (begun,) = three.start(three.ranks[:1], lambda r: r.links.switch(command, 0, FOR_EVER_S))
        assert opened.wait(WITHIN_S)
        for each in (first, second):
            each.end(3)
        with pytest.raises(Revoked):
            begun.result(WITHIN_S)
        for end in (taken, pending):
            end.settimeout(WITHIN_S)
            assert end.recv(1) == b""
        with pytest.raises(KeyError):
            first.control.link("control", 2)

        command = move(three, joiner, 3)
        parties = ((first, 0), (second, 1), (joiner, 2))
        done = [three.pool.submit(links.switch, command, r, WITHIN_S) for links, r in parties]
        # rank 0 closed its control link to the leaver in the switch that was cut
        counters = [each.result(WITHIN_S) for each in done]
        assert counters == [(2, 1, 2), (2, 2, 2), (4, 0, 0)]
        assert kept == (
            first.control.link("control", 1).identity(),
            first.data.link(RING, 1).identity(),
        )
        assert first.control.link("control", 2).peer_worker == "w8"


def test_a_joiner_whose_switch_was_cut_joins_with_the_next_plan(
    three: World, tmp_path: Path, waiting: threading.Event
) -> None:
    with standby(tmp_path, 9) as joiner:
        command, stayers = move(three, joiner, 2), three.ranks[:2]
        waiting.clear()
        # rank 1 does not come: the joiner has linked with rank 0, and that with it
        stayers[0].links.end(2)
        begun = [
            three.pool.submit(stayers[0].links.switch, command, 0, FOR_EVER_S),
            three.pool.submit(joiner.switch, command, 2, FOR_EVER_S),
        ]
        assert waiting.wait(WITHIN_S)
        for links in (stayers[0].links, stayers[1].links, joiner):
            links.end(3)
        for each in begun:
            with pytest.raises(Revoked):
                each.result(WITHIN_S)
        command = move(three, joiner, 3)
        parties = ((stayers[0].links, 0), (stayers[1].links, 1), (joiner, 2))
        done = [three.pool.submit(links.switch, command, r, WITHIN_S) for links, r in parties]
        for each in done:
            each.result(WITHIN_S)
        stands_in = Rank(2, three.ranks[2].seat, joiner, three.ranks[2].vote)
        stands_in.seat.start(live(command, 2))
        stands_in.vote.rebind(joiner.control, 2, command.placement)
        stands_in.vote._fence = joiner.control_fence
        members = [*stayers, stands_in]
        for rank in stayers:
            rank.seat.move(lambda p: commit.obey(p, 3, 0) or p)
        got = three.start(members, lambda r: r.vote.rebuddy(0, r.parts(), WITHIN_S))
        for vote in got:
            vote.result(WITHIN_S)
