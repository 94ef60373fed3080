"""The two meshes of a worker: one for its groups' data, one for votes and extras.

They have a fence each, so that a rank whose data link broke can still say so over the control
links (FASTFAIL); a plan ends both.
"""

from pathlib import Path

from trainmover.runtime.endpoint import Endpoint
from trainmover.runtime.fence import Cancellation, Fence, Revoked
from trainmover.runtime.mesh import Mesh
from trainmover.runtime.topology import Assignment, control_edges
from trainmover.runtime.vote import CHANNEL
from trainmover.schemas.commands import Drop, Prepare, Switch
from trainmover.schemas.environment import WorkerEnvironment

NEVER = 1 << 32
"""Above every generation that a frame can carry."""


class Links:
    """`data` and `control` are made anew for each run of `train`; the listeners stay."""

    def __init__(self, env: WorkerEnvironment) -> None:
        first, _, last = env.port_range.partition("-")
        self.endpoint = Endpoint(
            env.job,
            env.worker,
            env.machine,
            bytes.fromhex(env.secret),
            Path(env.directory),
            host=env.host,
            port_range=(int(first), int(last)) if env.port_range else None,
        )
        self.cancellation = Cancellation()
        self.data_fence, self.control_fence = (Fence(self.cancellation) for _ in range(2))
        self.data = Mesh(self.endpoint, self.data_fence, share_memory=True)
        self.control = Mesh(self.endpoint, self.control_fence)

    def renew(self, placement: tuple[str, ...]) -> None:
        """`train` is about to run for another role: nothing of the last one's groups stays."""
        self.data.close()
        self.control.close()
        self.data = Mesh(self.endpoint, self.data_fence, share_memory=True)
        self.control = Mesh(self.endpoint, self.control_fence)
        self.control.register(CHANNEL, control_edges(placement))

    def prepare(self, command: Prepare, rank: int, deadline_s: float) -> None:
        """A joiner opens its links ahead; nothing that runs here or at its neighbours changes.

        Blocks; raises ConnectionError for a neighbour that cannot be reached, Revoked when a
        newer generation is promised.
        """
        try:
            for mesh in (self.control, self.data):
                mesh.prepare(_assignment(command, rank), deadline_s)
        except Revoked:
            self._drop(command.generation)
            raise

    def drop(self, command: Drop) -> None:
        """Close what was opened ahead for a planned generation, on either end."""
        self._drop(command.generation)

    def _drop(self, generation: int) -> None:
        for mesh in (self.control, self.data):
            mesh.drop(generation)

    def switch(self, command: Switch, rank: int, deadline_s: float) -> tuple[int, int, int]:
        """Links opened, closed and kept. Opens the control fence; data waits for the resume.

        Blocks; raises TimeoutError that says what it waited for, ConnectionError, or Revoked when
        a newer generation is promised.
        """
        assignment = _assignment(command, rank)
        try:
            counters = [mesh.switch(assignment, deadline_s) for mesh in (self.control, self.data)]
        except BaseException:
            self._drop(command.generation)
            raise
        self.control_fence.open(command.generation)
        return (
            sum(c.opened for c in counters),
            sum(c.closed for c in counters),
            sum(c.kept for c in counters),
        )

    def open_data(self, generation: int) -> None:
        self.data_fence.open(generation)

    def end(self, generation: int) -> None:
        """CUT: whatever runs below `generation`, or is on its way to run, is over on every link
        when this returns."""
        cause = f"generation {generation} was planned"
        self.cancellation.cancel(generation, cause)
        for fence in (self.data_fence, self.control_fence):
            fence.end(generation, cause)

    def retire(self) -> None:
        """This worker gets no other generation: a switch under way is cut short. What runs goes on
        until its links are closed. Blocks no longer than `Fence.revoke`."""
        self.cancellation.cancel(NEVER, "this worker is retired")
        if self.control_fence.generation > self.data_fence.generation:  # extras go to the buddies
            self.control_fence.end(NEVER, "this worker is retired")

    def cut_one(self) -> None:
        """For drills: shut down one link that carries data, as a broken cable does."""
        for channel in self.data.channels:
            for link in self.data.links(channel).values():
                link.shutdown()
                return

    def close(self) -> None:
        self.data.close()
        self.control.close()
        self.endpoint.close()


def _assignment(command: Prepare | Switch, rank: int) -> Assignment:
    return Assignment(
        generation=command.generation,
        rank=rank,
        workers={m.rank: m.worker for m in command.members},
        addresses={m.worker: m.addresses for m in command.members},
        joiners=command.joiners,
    )
