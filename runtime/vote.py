"""The vote that commits a step: one tiny tree all-reduce over the control links.

Before it votes ok a rank has sent its extras for the next step to its buddies and has received
its neighbours'; so a completed ok vote proves that every rank has finished gradients and that
every rank's extras are held elsewhere (docs/design/commit.md, rule 3). Runs in the training
thread on its own links.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import structlog

from trainmover.runtime import commit
from trainmover.runtime.ballot import Ballot
from trainmover.runtime.commit import Phase, Position
from trainmover.runtime.extras import Parts, pack, unpack
from trainmover.runtime.fence import Fence, Revoked
from trainmover.runtime.mesh import Mesh
from trainmover.runtime.pump import Pump
from trainmover.runtime.seat import Seat
from trainmover.runtime.topology import buddies, tree_children, tree_parent
from trainmover.runtime.wire import Header, Kind

log = structlog.get_logger()

CHANNEL = "control"
SAY_EVERY_S = 10.0
"""A vote may wait as long as the slowest rank computes; who waits says for whom this often."""
FULL, WANTS_ACK = 1, 2
_NO_VOTES: Mapping[int, Ballot] = MappingProxyType({})


class Vote:
    """One per worker and role; `seat` has the position that every message is judged by."""

    def __init__(
        self, seat: Seat, mesh: Mesh, fence: Fence, rank: int, placement: tuple[str, ...]
    ) -> None:
        self._seat, self._fence = seat, fence
        self.rebind(mesh, rank, placement)
        self._votes: dict[int, dict[int, Ballot]] = {}
        """Step -> child in the tree -> what its subtree says."""
        self._results: dict[int, Ballot] = {}
        self._failed: set[int] = set()
        """Steps of which a vote below or the result says abort."""
        self._acks: set[tuple[int, int]] = set()
        self._introduced: set[int] = set()
        """Ranks whose full extras came in this generation: they wait for our acknowledgement."""
        self._sent: Parts = {}

    def rebind(self, mesh: Mesh, rank: int, placement: tuple[str, ...]) -> None:
        """Take the place of `rank` in the tree and among the buddies; no vote is open."""
        self._mesh, self.rank = mesh, rank
        self._pump = Pump((), self._fence)
        world = range(len(placement))
        chosen = buddies(placement)
        self.buddies = chosen[rank]
        self.neighbours = tuple(r for r in world if rank in chosen[r])
        """Ranks whose extras this one keeps."""
        self._parent = tree_parent(rank)
        self._kids = tree_children(rank, len(placement))

    # ---- extras

    def rebuddy(self, version: int, parts: Parts, deadline_s: float | None) -> None:
        """REBUDDY: this rank's extras to its buddies, acknowledged, and the neighbours' here.

        Blocks; raises Revoked, LinkBroken, or TimeoutError. Without a deadline it waits as long as
        the slowest set-up takes, and says for whom.
        """
        self._votes.clear()
        self._results.clear()
        self._failed.clear()
        self._acks.clear()
        self._introduced.clear()
        self._pump = Pump(self._mesh.links(CHANNEL).values(), self._fence)
        self._send_extras(version, parts, full=True, wants_ack=True)
        self._run(
            lambda: self._acknowledged(version) and self._introduced.issuperset(self.neighbours),
            "extras of the neighbours and acknowledgements of the buddies",
            deadline_s=deadline_s,
        )

    def late_extras(self, version: int, parts: Parts) -> tuple[str, ...]:
        """Rule 8: what changed since the vote goes to the buddies and is acknowledged.

        Returns the names of the changed parts; blocks only when there are some.
        """
        if parts is self._sent or parts == self._sent:  # or identical values, as a rule
            return ()
        changed = tuple(name for name, value in parts.items() if self._sent.get(name) != value)
        if changed and self.buddies:
            self._acks.clear()
            self._send_extras(version, parts, full=False, wants_ack=True)
            self._run(lambda: self._acknowledged(version), "acknowledged late extras")
        return changed

    def _send_extras(self, version: int, parts: Parts, *, full: bool, wants_ack: bool) -> None:
        changed = {k: v for k, v in parts.items() if full or self._sent.get(k) != v}
        payload = pack(changed, bytes([FULL * full | WANTS_ACK * wants_ack]))
        self._sent = parts
        for rank in self.buddies:
            self._pump.send(rank, Kind.EXTRAS, version, payload)

    def _acknowledged(self, version: int) -> bool:
        return all((rank, version) in self._acks for rank in self.buddies)

    # ---- the vote

    def vote(self, step: int, own: Ballot, parts: Parts, hit: Callable[[str], None]) -> Ballot:
        """Returns the combined ballot of a committed step; its `failed` says abort.

        Blocks until every rank has voted. Raises Revoked or LinkBroken when the vote was cut
        off; the seat's position then says whether the step is held.
        """
        seat = self._seat
        seat.move(_gathered)
        self._send_extras(step + 1, parts, full=False, wants_ack=False)
        self._run(lambda: self._ready(step), "votes of its subtree")
        hit("extras")
        if step in self._failed:
            return self._abort(step)
        combined = own
        for vote in self._votes.get(step, _NO_VOTES).values():
            combined = combined.plus(vote)
        if self._parent is None:
            hit("vote")
            total = combined
        else:
            seat.move(_voted)
            self._pump.send(self._parent, Kind.VOTE, step, combined.to_bytes())
            self._sent_all()
            hit("vote")
            try:
                self._run(lambda: step in self._results, "the result of the vote")
            except Revoked:
                # XKNOW may have told meanwhile that the step is committed.
                if seat.position.phase is Phase.APPLYING:
                    return Ballot()
                raise
            total = self._results[step]
        return self._spread(step, total, hit)

    def _spread(self, step: int, total: Ballot, hit: Callable[[str], None]) -> Ballot:
        """Take the result and pass it on to the subtree."""
        seat, generation = self._seat, self._fence.generation
        ok, freeze = not total.failed, total.freeze
        position = seat.move(lambda p: commit.result(p, generation, step, ok, freeze))
        if position.phase is not Phase.APPLYING and not total.failed:
            raise Revoked("the generation ended before the result of the vote was taken")
        hit("result")
        try:
            if self._kids:
                packed = total.to_bytes()
                for kid in self._kids:
                    self._pump.send(kid, Kind.RESULT, step, packed)
                self._sent_all()
        except Exception as error:
            # The commit is known; who did not hear it learns it from the mover's decision.
            log.info("vote.result_not_forwarded", step=step, error=str(error))
        self._forget(step)
        return total

    def abort(self, step: int) -> None:
        """FASTFAIL: this rank cannot finish the step; tell parent and children at once.

        Owes no extras. Best effort: who does not hear it is cut off by the next generation.
        """
        try:
            self._abort(step)
        except Exception as error:
            log.info("vote.abort_not_forwarded", step=step, error=str(error))

    def _abort(self, step: int) -> Ballot:
        failed = Ballot(failed=True)
        self._seat.move(commit.failed)
        if self._parent is not None:
            self._pump.send(self._parent, Kind.VOTE, step, failed.to_bytes())
        for kid in self._kids:
            self._pump.send(kid, Kind.RESULT, step, failed.to_bytes())
        self._sent_all(deadline_s=1.0)
        return failed

    def _ready(self, step: int) -> bool:
        """All votes of the subtree and all extras are here, or nothing is to be waited for.

        FASTFAIL: a failed vote below or an abort from above ends every wait of the step.
        """
        return step in self._failed or (
            len(self._votes.get(step, _NO_VOTES)) == len(self._kids)
            and commit.may_vote(self._seat.position, self.neighbours)
        )

    def _forget(self, step: int) -> None:
        """The step is committed: of those before it nothing is left."""
        self._votes.pop(step, None)
        self._results.pop(step, None)

    # ---- messages

    def _sent_all(self, deadline_s: float | None = None) -> None:
        """Waits only where a socket was full."""
        if self._pump.unsent:
            self._run(lambda: True, "a socket with room", deadline_s)

    def _run(self, until: Callable[[], bool], what: str, deadline_s: float | None = None) -> None:
        while True:
            try:
                self._pump.run(
                    self._handle,
                    until,
                    deadline_s or SAY_EVERY_S,
                    lambda: f"{what} (votes here: {sorted(self._votes)})",
                )
                return
            except TimeoutError as error:
                if deadline_s is not None:
                    raise
                log.warning("vote.waits", rank=self.rank, for_what=what, detail=str(error))

    def _handle(self, rank: int, header: Header, payload: bytes) -> None:
        step = header.step
        match header.kind:
            case Kind.EXTRAS:
                flags, parts = payload[0], unpack(payload, at=1)
                if full := bool(flags & FULL):
                    self._introduced.add(rank)
                self._seat.keep(self._fence.generation, rank, step, parts, full=full)
                if flags & WANTS_ACK:
                    self._pump.send(rank, Kind.EXTRAS_ACK, step, b"")
            case Kind.EXTRAS_ACK:
                self._acks.add((rank, step))
            case Kind.VOTE | Kind.RESULT:
                ballot = Ballot.from_bytes(payload)
                if ballot.failed:
                    self._failed.add(step)
                if header.kind is Kind.VOTE:
                    self._votes.setdefault(step, {})[rank] = ballot
                else:
                    self._results[step] = ballot


# ---- CUT: no decision of an ended generation is taken


def _gathered(position: Position) -> Position:
    return commit.gathered(_running(position))


def _voted(position: Position) -> Position:
    return commit.voted(_running(position))


def _running(position: Position) -> Position:
    if position.ended:
        raise Revoked("the generation has ended")
    return position
