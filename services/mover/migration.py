"""The pieces of a migration: who is told what next, from the answers about its generation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from trainmover.schemas.commands import Answer, Bundle, Decided, Pull, Stage, Switch
from trainmover.schemas.events import (
    JobSubmitted,
    MigrationAborted,
    MigrationCompleted,
    MigrationDecided,
    MigrationPlanned,
    MigrationSwitched,
    RankTimes,
    Restored,
)
from trainmover.schemas.member import Member
from trainmover.schemas.shards import Shards, sources
from trainmover.services.contract import Ask, Output
from trainmover.services.mover.verdict import Verdict, extras_holder

MAX_DONORS = 8
"""More at once would make a joiner no faster."""


@dataclass(frozen=True, slots=True)
class Migration:
    spec: JobSubmitted
    plan: MigrationPlanned
    placement: tuple[str, ...]
    """Machine of each rank in generation 1."""
    settled: frozenset[str]
    """Members of the last assignment that ran."""
    answers: Mapping[str, Answer]
    """Worker -> its latest answer, if that is about this plan's generation and promises it."""
    gone: frozenset[str] = frozenset()
    shards: Shards = field(default_factory=dict)
    tapes: Mapping[str, str] = field(default_factory=dict)
    """Role class -> name of what was recorded for it."""

    def stage(self, member: Member) -> Stage:
        answer = self.answers.get(member.worker)
        return answer.stage if answer else Stage.NONE

    @property
    def asked(self) -> tuple[Member, ...]:
        """Who ends the old generation: the members, and who gives its rank away and lives."""
        return (*self.plan.members, *self.leavers)

    @property
    def leavers(self) -> tuple[Member, ...]:
        """Without one a replica and a buddy give what there is."""
        return tuple(m for m in self.plan.leavers if m.worker not in self.gone)

    def any_below(self, stage: Stage) -> bool:
        return any(self.stage(m) < stage for m in self.plan.members)

    def tell_decision(self, decided: MigrationDecided) -> list[Output]:
        command = Decided(
            generation=self.plan.generation,
            layout=self.spec.layout,
            members=self.plan.members,
            placement=self.placement,
            target=decided.target,
            setup_again=decided.setup_again,
            tapes=dict(self.tapes),
        )
        return self._ask_below(Stage.OBEYED, command, self.asked)

    def tell_pull(self, decided: MigrationDecided) -> list[Output]:
        """DIRTYACK: only a member that acknowledged the decision clean is a donor.

        A leaver that is there gives to its joiner all there is, its own state too; its answer is
        waited for. Else every clean replica gives a stripe.
        """
        by_rank = {m.rank: m for m in self.plan.members}
        clean = {m.rank for m in self.plan.members if self.stage(m) >= Stage.RESTORED}
        giving = {m.rank: m for m in self.leavers if self.stage(m) >= Stage.RESTORED}
        moving = {m.rank for m in self.leavers if self.stage(m) < Stage.OBEYED}
        if not clean and not giving and not moving and not self.any_below(Stage.OBEYED):
            reason = "no rank acknowledged the decided step clean: nothing holds a sound copy"
            return [abort(self.plan, reason, state_lost=True)]
        out: list[Output] = []
        for m in self.plan.members:
            if self.stage(m) != Stage.OBEYED or m.rank in moving:
                continue
            leaver = giving.get(m.rank)
            if leaver:
                bundles = [Bundle(donors=(leaver,))]
            else:
                bundles = [
                    Bundle(objects=names, donors=[by_rank[r] for r in _spread(ranks, m.rank)])
                    for names, ranks in sources(self.spec.layout, self.shards, m.rank, clean)
                ]
            if bundles:
                pull = Pull(
                    generation=self.plan.generation,
                    target=decided.target,
                    donor=bundles[0].donors[0],
                    bundles=tuple(bundles),
                    extras_from=leaver
                    or extras_holder(m.rank, decided.target, self.plan.members, self.answers),
                )
                out.append(Ask(m.worker, pull))
        return out

    def different_state(self) -> MigrationAborted | None:
        """Invariant 9: what a joiner holds is compared with what its donor holds."""
        for m in self.plan.members:
            answer = self.answers[m.worker]
            if answer.donor and answer.digest != answer.donor_digest:
                reason = (
                    f"rank {m.rank}: the state that {m.worker} has differs from what its donor "
                    f"{answer.donor} holds (xxh3 {answer.digest} and {answer.donor_digest})"
                )
                return abort(self.plan, reason, (m.worker,))
        return None

    def tell_switch(self, decided: MigrationDecided) -> list[Output]:
        command = Switch(
            generation=self.plan.generation,
            layout=self.spec.layout,
            members=self.plan.members,
            placement=self.placement,
            joiners=tuple(
                m.rank
                for m in self.plan.members
                if decided.setup_again or m.worker not in self.settled
            ),
            target=decided.target,
            setup=decided.setup_again,
        )
        return self._ask_below(Stage.SWITCHED, command, self.plan.members)

    def switched(self, decided: MigrationDecided) -> MigrationSwitched:
        restored = [
            Restored(
                rank=m.rank,
                worker=m.worker,
                donor=answer.donor,
                donors=answer.donors,
                num_bytes=answer.num_bytes,
                seconds=answer.pull_s,
                digest=answer.digest,
            )
            for m in self.plan.members
            if (answer := self.answers[m.worker]).donor
        ]
        answers = [self.answers[m.worker] for m in self.plan.members]
        totals = [a.total for a in answers if a.total is not None]
        return MigrationSwitched(
            job=self.plan.job,
            run=self.plan.run,
            generation=self.plan.generation,
            incident=self.plan.incident,
            target=decided.target,
            total=min(totals) if totals else None,
            restored=tuple(restored),
            links={str(m.rank): self.answers[m.worker].links for m in self.plan.members},
        )

    def completed(self) -> MigrationCompleted:
        plan, answers = self.plan, self.answers
        steps_s = [s for m in plan.members if (s := answers[m.worker].normal_step_s) is not None]
        return MigrationCompleted(
            job=plan.job,
            run=plan.run,
            generation=plan.generation,
            incident=plan.incident,
            committed=min(answers[m.worker].committed for m in plan.members),
            ranks=tuple(
                RankTimes(
                    rank=m.rank,
                    worker=m.worker,
                    joined=m.worker not in self.settled,
                    reached=dict(answers[m.worker].reached),
                )
                for m in plan.members
            ),
            normal_step_s=median(steps_s) if steps_s else None,
        )

    def _ask_below(
        self, stage: Stage, command: Decided | Switch, members: tuple[Member, ...]
    ) -> list[Output]:
        return [Ask(m.worker, command) for m in members if self.stage(m) < stage]


def _spread(ranks: tuple[int, ...], joiner: int) -> tuple[int, ...]:
    """Donors for one joiner: another one is the first for the next."""
    first = joiner % len(ranks)
    return (*ranks[first:], *ranks[:first])[:MAX_DONORS]


def stage_of(answer: Answer | None, generation: int) -> Stage:
    """How far a worker is towards `generation`; answers about another one do not count."""
    return answer.stage if answer and answer.about == generation else Stage.NONE


def decision(plan: MigrationPlanned, found: Verdict) -> MigrationDecided | MigrationAborted:
    """The verdict on a plan as an event."""
    if found.problem:
        return abort(plan, found.problem, state_lost=found.state_lost)
    return MigrationDecided(
        job=plan.job,
        run=plan.run,
        generation=plan.generation,
        incident=plan.incident,
        target=found.target,
        setup_again=found.setup_again,
        sources=found.sources,
        dirty=found.dirty,
        holding=found.holding,
    )


def abort(
    plan: MigrationPlanned, reason: str, missing: tuple[str, ...] = (), *, state_lost: bool = False
) -> MigrationAborted:
    return MigrationAborted(
        job=plan.job,
        run=plan.run,
        generation=plan.generation,
        incident=plan.incident,
        reason=reason,
        missing=missing,
        state_lost=state_lost,
    )
