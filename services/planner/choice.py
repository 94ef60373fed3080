"""Who gets a rank: the first members, the joiners, and which end of a broken link is replaced."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import assert_never

from trainmover.schemas.events import PeerLost, Replacement, StepAborted, WorkerRegistered
from trainmover.schemas.member import Member
from trainmover.services.planner.state import PAIR_WINDOW_S, Phase, Sign, State

SETTLE_S = 0.3
"""From the first sign of a broken link to a relink, stream clock: the exit of a worker is known
within 0.15 s (detection.md), so a death is normally seen as one."""
OTHER_MACHINES_S = 300.0
"""How long ranks wait for a machine of the layout before standbys elsewhere take them."""
FAULT_DOMAINS = ("switch", "rack", "zone")
"""Labels of machines that fail together, the narrowest first."""
STABLE_S = 10.0
"""Registrations are awaited so long after the last start or registration of a worker, so that
surplus workers do not get a rank only because they were faster, on a busy machine too."""


def first_members(state: State, now_s: float) -> tuple[Member, ...]:
    """Generation 1, in rank order by (machine, local index); empty while it must wait.

    Workers with a local index below `workers_per_machine` come first. Others get a rank only if
    no such worker is still on its way, or `STABLE_S` has passed since the last one started or
    registered; with a machine that has not come at all, `OTHER_MACHINES_S`.
    """
    job = state.submitted
    assert job is not None
    by_place = sorted(
        state.free,
        key=lambda w: (w.local_index >= job.workers_per_machine, w.machine, w.local_index),
    )
    chosen = by_place[: job.layout.world_size]
    surplus = any(w.local_index >= job.workers_per_machine for w in chosen)
    quiet_s = now_s - max(state.launched_s, state.registered_s)
    waits = surplus and (
        (_on_the_way(state) and quiet_s < STABLE_S)
        or (_machines_missing(state) and quiet_s < OTHER_MACHINES_S)
    )
    if len(chosen) < job.layout.world_size or waits:
        return ()
    chosen.sort(key=lambda w: (w.machine, w.local_index))
    return tuple(member(rank, worker) for rank, worker in enumerate(chosen))


def _on_the_way(state: State) -> bool:
    """Whether a place below `workers_per_machine`, on a machine that is here, has nobody yet."""
    assert state.submitted is not None
    per_machine = state.submitted.workers_per_machine
    here = state.registered.keys() | state.exited | state.unfit
    starting = any(
        worker.local_index < per_machine
        for name, worker in state.launched.items()
        if name not in here
    )
    came = {(worker.machine, worker.local_index) for worker in state.launched.values()}
    came |= {(worker.machine, worker.local_index) for worker in state.registered.values()}
    expected = {(machine, index) for machine, _ in came for index in range(per_machine)}
    return starting or not expected <= came


def _machines_missing(state: State) -> bool:
    """Machines start minutes apart on a cluster; their ranks should not land on one of them."""
    job = state.submitted
    assert job is not None
    machines = {w.machine for w in state.registered.values()}
    machines |= {w.machine for w in state.launched.values()}
    return len(machines) * job.workers_per_machine < job.layout.world_size


def member(rank: int, worker: WorkerRegistered) -> Member:
    """The line of an assignment that gives `rank` to `worker`."""
    return Member(
        rank=rank, worker=worker.worker, machine=worker.machine, addresses=worker.addresses
    )


def replacements(
    state: State, leavers: Sequence[Member], named: Mapping[str, str] = MappingProxyType({})
) -> tuple[Replacement, ...]:
    """A joiner for each leaver, in rank order; fewer when the standbys do not suffice.

    Who is `named` for a leaver takes its rank. Of the others, standbys that are warm for the
    leaver's role class come first, then those that are for another, then those that share the
    least with the leaver (`shared`), then the oldest registration.
    """
    taken = {named.get(leaver.worker) for leaver in leavers}
    free = [w for w in state.free if w.worker not in taken]
    chosen = []
    for leaver in leavers:
        if leaver.worker in named:
            joiner = state.registered[named[leaver.worker]]
            chosen.append(replacement(leaver, joiner))
            continue
        if not free:
            continue
        role_class = state.role_classes.get(leaver.rank, "")
        joiner = min(
            free,
            key=lambda w: (
                role_class not in (warm := state.warmed.get(w.worker, frozenset())),
                not warm,
                *shared(state, leaver, w),
            ),
        )
        free.remove(joiner)
        chosen.append(replacement(leaver, joiner))
    return tuple(chosen)


def replacement(leaver: Member, joiner: WorkerRegistered) -> Replacement:
    return Replacement(rank=leaver.rank, leaver=leaver.worker, joiner=joiner.worker)


def shared(state: State, leaver: Member, standby: WorkerRegistered) -> tuple[bool, ...]:
    """What a standby shares with a leaver, the narrowest first: what took that one may take this
    one too. Machines without a label share it with nobody."""
    known = state.registered.get(leaver.worker)
    labels = known.labels if known else {}
    return (
        standby.machine == leaver.machine,
        *(
            label in labels and standby.labels.get(label) == labels[label]
            for label in FAULT_DOMAINS
        ),
    )


@dataclass(frozen=True, slots=True)
class Break:
    """A generation that cannot go on though nobody is known to be dead."""

    reason: str
    suspect: Member | None
    """Who should be replaced, because the link alone does not explain it."""


def broken(state: State, now_s: float) -> Break | None:
    """Whether the ranks of the generation in force lost a link `SETTLE_S` ago (commit.md RELINK).

    Counts what was reported since they were told to run. A member that two others or more have
    lost, and more have lost than any other, is suspect. So is an end of a link that was made
    again within `PAIR_WINDOW_S`: the one that fewer peers reach, of two equals the higher rank.
    """
    latest = state.latest
    running = latest.phase in (Phase.RUNNING, Phase.SWITCHED)
    signs = [
        sign
        for sign in state.signs
        if sign.event.generation == latest.generation and sign.seq > latest.since_seq
    ]
    if not running or not signs or now_s - signs[0].time_s < SETTLE_S:
        return None
    members = {m.worker: m for m in latest.members}
    links = [link for link in _links(signs) if members.keys() >= set(link)]
    lost_by = Counter(peer for _, peer in links)
    (first, count), (_, next_count) = [*lost_by.most_common(2), ("", 0), ("", 0)][:2]
    if count >= 2 and count > next_count:
        return Break(f"{count} peers lost their links to {first}", members[first])
    again = {frozenset(link) for link in links} & _relinked(state, now_s)
    if again:
        ends = {worker for pair in again for worker in pair}
        suspect = max(ends, key=lambda worker: (lost_by[worker], members[worker].rank))
        return Break(
            f"a link of {suspect} broke again within {PAIR_WINDOW_S:g} s", members[suspect]
        )
    return Break(_words(signs[0].event), None)


def _relinked(state: State, now_s: float) -> set[frozenset[str]]:
    """Links that broke lately and were made again by a plan that replaced nobody."""
    generations = {a.generation for a, b in pairwise(state.assignments) if not b.replacements}
    signs = [
        sign
        for sign in state.signs
        if sign.event.generation in generations and now_s - sign.time_s <= PAIR_WINDOW_S
    ]
    return {frozenset(link) for link in _links(signs)}


def _links(signs: Sequence[Sign]) -> list[tuple[str, str]]:
    """(who says so, which peer) of the lost links, each once."""
    events = (sign.event for sign in signs)
    return list(dict.fromkeys((e.worker, e.peer) for e in events if isinstance(e, PeerLost)))


def _words(event: PeerLost | StepAborted) -> str:
    match event:
        case PeerLost():
            return f"{event.worker} lost its link to {event.peer} and nobody is known to be dead"
        case StepAborted():
            return f"{event.worker} aborted step {event.step} and nobody is known to be dead"
        case _:
            assert_never(event)
