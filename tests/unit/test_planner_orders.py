"""Whatever happens in whatever order, and however often it is told, the plans stay sound."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from trainmover.schemas.base import Event
from trainmover.schemas.events import (
    Exit,
    JobCompleted,
    JobFailed,
    JobSubmitted,
    LayoutAssigned,
    MigrationAborted,
    MigrationCompleted,
    MigrationDecided,
    MigrationPlanned,
    MigrationSwitched,
    PeerLost,
    StandbyWarmed,
    StepAborted,
    WorkerExited,
    WorkerFailed,
    WorkerFinished,
    WorkerRegistered,
)
from trainmover.schemas.layout import Layout
from trainmover.schemas.member import Member
from trainmover.schemas.recorded import Recorded
from trainmover.services.contract import Inputs
from trainmover.services.planner.decide import SERVICE
from trainmover.services.planner.state import State

J = {"job": "j", "run": "r1"}
LAYOUT = Layout.parse("dp=3")
WORKERS = [f"w{i}" for i in range(9)]


@dataclass
class Stream:
    """A stream with one planner on it; checks every output against the history before it."""

    state: State = SERVICE.initial
    events: list[Event] = field(default_factory=list)
    now_s: float = 0.0
    generation: int = 0
    over: bool = False
    members: tuple[str, ...] = ()
    """Workers of the generation in force, in rank order."""
    held: set[str] = field(default_factory=set)
    """Workers that hold or held a rank."""
    failed: set[str] = field(default_factory=set)
    exited: set[str] = field(default_factory=set)

    def append(self, event: Event) -> None:
        self.events.append(event)
        record = Recorded(seq=len(self.events), time_s=self.now_s, event=event)
        self.state = SERVICE.evolve(self.state, record)
        match event:
            case WorkerFailed():
                self.failed |= set(event.workers)
            case WorkerExited():
                self.exited |= {exit.worker for exit in event.exits}
            case MigrationAborted() if event.generation == self.generation:
                self.failed |= set(event.missing)

    def settle(self) -> None:
        """Feeds the outputs back until there are none; a planner that never rests fails here."""
        for _ in range(5):
            outputs = SERVICE.decide(self.state, Inputs(now_s=self.now_s, up_since_s=0.0))
            if not outputs:
                return
            for output in outputs:
                assert isinstance(output, Event)
                self.check(output)
                self.append(output)
        raise AssertionError(f"outputs do not end, the last: {outputs}")

    def check(self, output: Event) -> None:
        assert not self.over
        match output:
            case LayoutAssigned():
                assert self.generation == 0
                self.check_members(output.generation, output.members)
            case MigrationPlanned():
                assert output.generation == self.generation + 1
                joiners = [(r.rank, r.joiner) for r in output.replacements]
                ranks = [rank for rank, _ in joiners]
                assert len(ranks) == len(set(ranks))
                assert set(joiners) <= {(m.rank, m.worker) for m in output.members}
                assert (
                    not {r.leaver for r in output.replacements}
                    & set(self.members)
                    & {m.worker for m in output.members}
                )
                self.check_members(output.generation, output.members)
            case JobCompleted() | JobFailed():
                self.over = True

    def check_members(self, generation: int, members: tuple[Member, ...]) -> None:
        workers = tuple(m.worker for m in members)
        assert [m.rank for m in members] == list(range(LAYOUT.world_size))
        assert len(workers) == len(set(workers))
        assert not self.failed & set(workers)
        new = set(workers) - set(self.members)
        assert not new & (self.exited | self.held)
        for rank, (before, after) in enumerate(zip(self.members, workers, strict=False)):
            assert before == after or after in new, f"rank {rank} went to a member"
        self.generation, self.members, self.held = generation, workers, self.held | new


workers = st.sampled_from(WORKERS)
happenings = st.one_of(
    st.builds(lambda w: ("register", w), workers),
    st.builds(lambda w: ("fail", w), workers),
    st.builds(lambda rank: ("fail member", str(rank)), st.integers(0, 2)),
    st.builds(lambda w: ("exit", w), workers),
    st.builds(lambda w: ("warm", w), workers),
    st.builds(lambda w: ("abort", w), st.sampled_from(["", *WORKERS])),
    st.sampled_from([("decide", ""), ("switch", ""), ("complete", "")]),
    st.builds(lambda w: ("cut", w), workers),
    st.builds(lambda w: ("finish", w), workers),
    st.builds(lambda n: ("repeat", str(n)), st.integers(0, 60)),
)


def event(stream: Stream, what: str, which: str) -> Event | None:
    """What happened, as an event about the generation in force; None: it cannot happen now."""
    generation = stream.generation
    index = WORKERS.index(which) if which in WORKERS else 0
    match what:
        case "fail member" if generation:
            return event(stream, "fail", stream.members[int(which)])
        case "register":
            return WorkerRegistered(
                **J, worker=which, machine=f"m{index % 2}", local_index=index // 2, addresses=("x",)
            )
        case "fail":
            return WorkerFailed(
                **J,
                workers=(which,),
                kind="crash",
                machine=f"m{index % 2}",
                evidence="",
                reason="",
                first_evidence=0.0,
            )
        case "exit":
            return WorkerExited(**J, machine="m0", exits=(Exit(worker=which, code=-9),))
        case "warm":
            return StandbyWarmed(**J, worker=which, rank=0, warm_s=1.0)
        case "repeat":
            return stream.events[int(which) % len(stream.events)]
        case "cut" if generation:
            if index % 2:
                return StepAborted(
                    **J, worker=which, rank=0, generation=generation, step=1, cause=""
                )
            return PeerLost(
                **J, worker=which, peer="w1", generation=generation, channel="c", cause=""
            )
        case "finish" if which in stream.state.ranks:
            return WorkerFinished(
                **J,
                worker=which,
                rank=stream.state.ranks[which],
                generation=generation,
                committed=9,
                digest="d",
            )
    return migration(stream, what, which) if generation > 1 else None


def migration(stream: Stream, what: str, which: str) -> Event | None:
    generation, incident = stream.generation, stream.state.latest.incident
    match what:
        case "abort":
            missing = (which,) if which in stream.members else ()
            return MigrationAborted(
                **J, generation=generation, incident=incident, reason="late", missing=missing
            )
        case "decide":
            return MigrationDecided(**J, generation=generation, incident=incident, target=1)
        case "switch":
            return MigrationSwitched(**J, generation=generation, incident=incident, target=1)
        case "complete":
            return MigrationCompleted(
                **J, generation=generation, incident=incident, committed=generation
            )
    return None


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(happenings, st.sampled_from([0.01, 0.5, 2.0])), max_size=50))
def test_no_order_of_events_leads_to_an_unsound_plan(
    history: list[tuple[tuple[str, str], float]],
) -> None:
    stream = Stream()
    stream.append(
        JobSubmitted(
            **J,
            layout=LAYOUT,
            workers_per_machine=2,
            num_standbys=2,
            script_digest="d",
            host="h",
            max_incidents=99,
        )
    )
    for worker in WORKERS[:4]:
        stream.append(event(stream, "register", worker) or stream.events[0])
    for (what, which), seconds in history:
        stream.now_s += seconds
        happened = event(stream, what, which)
        if happened is not None:
            stream.append(happened)
        stream.settle()
