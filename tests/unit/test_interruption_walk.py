"""Planner and mover on one stream: announcements, cancels, deadlines and deaths in any order."""

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.unit.planner_histories import J, cancelled, failed, registered, submitted

from trainmover.schemas.base import Event
from trainmover.schemas.commands import Answer, Drop, Freeze, Prepare
from trainmover.schemas.events import (
    InterruptionAnnounced,
    InterruptionCancelled,
    JobFailed,
    JobStarted,
    LayoutAssigned,
    MigrationAborted,
    MigrationCompleted,
    MigrationDecided,
    MigrationPlanned,
    MigrationPrepared,
    MigrationSwitched,
)
from trainmover.schemas.member import Member
from trainmover.schemas.recorded import Recorded
from trainmover.services.contract import Ask, Inputs, Output
from trainmover.services.mover.ahead import HASTE_S
from trainmover.services.mover.decide import SERVICE as MOVER
from trainmover.services.planner.decide import SERVICE as PLANNER
from trainmover.services.planner.ending import TERMINATED

MACHINES = ("m0", "m1", "m2")
machines = st.sampled_from(MACHINES)


class Walk(RuleBasedStateMachine):
    """Three ranks on two machines; workers do what they are asked when a rule lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.planner, self.mover = PLANNER.initial, MOVER.initial
        self.seq, self.now_s, self.over = 0, 0.0, False
        self.where: dict[str, str] = {}
        self.dead: set[str] = set()
        self.held: set[str] = set()
        self.standing: dict[str, InterruptionAnnounced] = {}
        self.generation = 1
        self.plan: MigrationPlanned | None = None
        """The newest, until it is completed or dropped."""
        self.decided = self.switched = False
        self.prepared: dict[str, int] = {}
        self.frozen: dict[str, int] = {}
        self.dropped: dict[str, int] = {}
        self.happen(submitted())
        for machine in ("m0", "m0", "m1", "m1", "m2"):
            self.join(machine)
        members = tuple(self.member(rank, f"w{rank}") for rank in range(3))
        self.happen(LayoutAssigned(**J, members=members))
        self.held |= {m.worker for m in members}
        self.happen(JobStarted(**J))

    # ---- the world

    def member(self, rank: int, worker: str) -> Member:
        addresses = (f"unix:/{worker}",)
        return Member(rank=rank, worker=worker, machine=self.where[worker], addresses=addresses)

    def happen(self, event: Event) -> None:
        self.seq += 1
        record = Recorded(self.seq, self.now_s, event)
        self.planner = PLANNER.evolve(self.planner, record)
        self.mover = MOVER.evolve(self.mover, record)

    def asked(self, worker: str) -> list[InterruptionAnnounced]:
        return [i for i in self.standing.values() if i.concerns(worker, self.where[worker])]

    def answers(self) -> dict[str, Answer]:
        """Of those that live, as far as a planned switch goes."""
        found = {}
        for worker in self.where.keys() - self.dead:
            empty = worker not in self.held
            found[worker] = Answer(
                worker=worker,
                set_up=True,
                empty=empty,
                running=0 if empty else 1,
                committed=0 if empty else 7,
                prepared=self.prepared.get(worker, 0),
                frozen=self.frozen.get(worker, 0),
                dropped=self.dropped.get(worker, 0),
            )
        return found

    # ---- what others do

    @rule(machine=machines)
    def join(self, machine: str) -> None:
        worker = f"w{len(self.where)}"
        self.where[worker] = machine
        self.happen(registered(worker, len(self.where), machine))

    @rule(
        data=st.data(),
        kind=st.sampled_from(["maintenance", "rebalance", "maintenance", "preemption"]),
        left_s=st.none() | st.floats(0, 60),
        machine=st.none() | machines,
        named=st.booleans(),
    )
    def announce(
        self, data: st.DataObject, kind: str, left_s: float | None, machine: str | None, named: bool
    ) -> None:
        who = data.draw(st.lists(st.sampled_from(sorted(self.where)), min_size=1, max_size=2))
        joiner = data.draw(st.sampled_from(sorted(self.where)))
        event = InterruptionAnnounced.model_validate(
            {
                **J,
                "interruption": f"i{self.seq}",
                "kind": kind,
                "workers": () if machine else tuple(who),
                "machine": machine,
                "deadline": None if left_s is None else self.now_s + left_s,
                "joiners": {who[0]: joiner} if named and not machine else {},
            }
        )
        self.standing[event.interruption] = event
        self.happen(event)

    @precondition(lambda self: self.standing)
    @rule(data=st.data(), again=st.booleans())
    def cancel(self, data: st.DataObject, again: bool) -> None:
        self.take_back(data.draw(st.sampled_from(sorted(self.standing))), again=again)

    def take_back(self, name: str, *, again: bool = False) -> None:
        event = self.standing.pop(name)
        self.happen(cancelled(name))
        if again:  # its announcement, once more from the network
            self.happen(event)

    @precondition(lambda self: self.plan is not None and self.plan.leavers and not self.decided)
    @rule(how=st.sampled_from(["cancel", "preempt", "hurry"]), left_s=st.floats(0, 15))
    def a_move_that_is_pending_is_disturbed(self, how: str, left_s: float) -> None:
        """Called off, overtaken by a preemption of somebody else, or short of time."""
        assert self.plan is not None
        leavers = {m.worker for m in self.plan.leavers}
        others = [m.worker for m in self.planner.latest.members if m.worker not in leavers]
        if how == "cancel":
            asked = {i.interruption for worker in leavers for i in self.asked(worker)}
            for name in sorted(asked):
                self.take_back(name)
            return
        who = others[0] if how == "preempt" and others else min(leavers)
        event = InterruptionAnnounced(
            **J,
            interruption=f"i{self.seq}",
            kind="preemption" if how == "preempt" else "maintenance",
            workers=(who,),
            deadline=self.now_s + left_s,
        )
        self.standing[event.interruption] = event
        self.happen(event)

    @rule(data=st.data())
    def somebody_dies(self, data: st.DataObject) -> None:
        alive = sorted(self.where.keys() - self.dead)
        if len(alive) > 4 and data.draw(st.integers(0, 2)) == 0:
            worker = data.draw(st.sampled_from(alive))
            self.dead.add(worker)
            self.happen(failed(worker, machine=self.where[worker]))

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    # ---- what the services do

    @rule()
    def planner_says(self) -> None:
        """Until it rests; a planner that never does fails here."""
        for _ in range(6):
            said = PLANNER.decide(self.planner, Inputs(now_s=self.now_s, up_since_s=0.0))
            if not said or self.over:
                return
            for output in said:
                assert isinstance(output, Event)
                self.check(output)
                self.happen(output)
        raise AssertionError(f"outputs do not end, the last: {said}")

    def check(self, output: Event) -> None:
        match output:
            case MigrationPlanned():
                assert output.generation == self.generation + 1
                self.check_members(output)
                self.generation, self.plan = output.generation, output
                self.decided = self.switched = False
                if output.kind != "planned":
                    self.held |= {m.worker for m in output.members}
            case InterruptionCancelled():
                assert self.standing.pop(output.interruption).joiners
            case JobFailed(exit_code=code):
                assert code != TERMINATED or any(
                    i.kind == "preemption" for i in self.standing.values()
                )
                self.over = True

    def check_members(self, plan: MigrationPlanned) -> None:
        workers = [m.worker for m in plan.members]
        assert len(set(workers)) == len(workers) == 3
        assert not self.dead & set(workers)
        joiners = {r.joiner for r in plan.replacements} - self.held
        assert not [w for w in joiners if self.asked(w)], "who is to leave got a rank"
        if plan.kind == "planned":
            assert all(self.asked(m.worker) for m in plan.leavers), "nobody asked for that"
            assert {m.worker for m in plan.leavers} == {r.leaver for r in plan.replacements}
            assert joiners == {r.joiner for r in plan.replacements}

    @rule(data=st.data())
    def mover_says(self, data: st.DataObject) -> None:
        """For some rounds, in which all but one do what they are asked."""
        plan = self.plan
        if self.over or plan is None or plan.kind != "planned" or self.decided:
            return
        deaf = data.draw(st.sampled_from(["", "", *sorted(self.where)]))
        for _ in range(data.draw(st.integers(1, 6))):
            inputs = Inputs(now_s=self.now_s, up_since_s=0.0, answers=self.answers())
            for output in MOVER.decide(self.mover, inputs):
                if not isinstance(output, Ask):
                    self.check_ahead(plan, output)
                    self.happen(output)
                elif output.worker != deaf:
                    self.obey(output)
            if self.plan is None or self.decided:
                return

    def obey(self, ask: Ask) -> None:
        worker = ask.worker
        match ask.command:
            case Prepare(generation=g):
                self.prepared[worker] = g
            case Freeze(generation=g):
                # One that stands for a plan stands for no other before it is told to go on.
                standing = self.frozen.get(worker, 0)
                assert standing in (0, g), f"{worker} stands for {standing} and is asked for {g}"
                if worker in self.held and g > self.dropped.get(worker, 0):
                    self.frozen[worker] = g
            case Drop(generation=g):
                self.dropped[worker] = max(g, self.dropped.get(worker, 0))
                if self.frozen.get(worker, 0) <= g:
                    self.frozen.pop(worker, None)
            case _:
                pass

    def check_ahead(self, plan: MigrationPlanned, output: Output) -> None:
        asked = [self.asked(m.worker) for m in plan.leavers]
        dead = self.dead & {m.worker for m in (*plan.members, *plan.leavers)}
        match output:
            case MigrationPrepared(unready=unready):
                late = [w for w in unready if self.prepared.get(w) == plan.generation]
                assert not late, "they are ready"
                ends_s = [i.deadline for some in asked for i in some if i.deadline is not None]
                assert not unready or min(ends_s) - HASTE_S <= self.now_s
            case MigrationDecided():
                assert all(asked), "it was cancelled"
                assert not dead
                holders = {m.worker for m in (*plan.members, *plan.leavers)} & self.held
                assert {self.frozen.get(w) for w in holders} == {plan.generation}
                self.decided = True
                self.held |= {m.worker for m in plan.members}
                self.frozen.clear()
            case MigrationAborted():
                assert dead or not all(asked)
                self.plan = None
            case _:
                raise AssertionError(f"not before the decision: {output}")

    @precondition(lambda self: self.plan is not None and not self.over)
    @rule()
    def migration_goes_on(self) -> None:
        """A crash is carried out, or a planned switch that is decided, as far as nobody died."""
        plan = self.plan
        assert plan is not None
        if self.dead & {m.worker for m in plan.members}:
            return
        words = {**J, "generation": plan.generation, "incident": plan.incident, "target": 7}
        events: Sequence[Event] = (
            MigrationSwitched.model_validate(words),
            MigrationCompleted.model_validate({**words, "committed": 8}),
        )
        if plan.kind != "planned":
            self.happen(MigrationDecided.model_validate(words))
            self.frozen.clear()  # a collect ends what they stood for
            self.dropped |= dict.fromkeys(self.where, plan.generation)
        elif not self.decided:
            return
        for event in events:
            self.happen(event)
        self.plan = None

    @invariant()
    def free_standbys_are_free(self) -> None:
        for worker in self.planner.free:
            assert worker.worker not in self.dead | self.held
            assert not self.asked(worker.worker)


Walk.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestWalk = Walk.TestCase
