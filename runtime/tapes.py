"""Where tapes lie: the job's objects on the bus."""

from trainmover.bus.port import BusError
from trainmover.runtime.control import Control
from trainmover.runtime.tape import Key, Tape, TapeUnusable, digest
from trainmover.schemas.environment import WorkerEnvironment

WITHIN_S = 10.0
"""To store or fetch a small tape: training waits for it, once."""
BYTES_PER_S = 20e6
"""And what a large one is given beyond."""
FETCH_S = WITHIN_S + (1 << 30) / BYTES_PER_S


class Tapes:
    """One for each role class of the job; a new one replaces the old one.

    A name says whose it is and what is in it: it stays the same if the same is recorded again.
    """

    def __init__(self, env: WorkerEnvironment, control: Control) -> None:
        self._env, self._control = env, control

    def key(self, role_class: str) -> Key:
        """Of the tapes of this job's `role_class`."""
        return Key(self._env.layout, self._env.script_digest, role_class)

    def put(self, tape: Tape) -> str:
        """Store it; its name. Blocks, for a small one 10 s at most. Raises TapeUnusable."""
        data = tape.to_bytes()
        try:
            within_s = WITHIN_S + len(data) / BYTES_PER_S
            self._control.put(tape.key.role_class, data, within_s)
        except (BusError, TimeoutError) as error:
            raise TapeUnusable(f"the tape could not be stored: {error!r}") from error
        return f"{tape.key.role_class}@{digest(data)}"

    def get(self, name: str, role_class: str) -> Tape:
        """The tape that `put` named so. Blocks for a minute at most. Raises TapeUnusable."""
        try:
            data = self._control.get(name.rpartition("@")[0], FETCH_S)
        except (BusError, TimeoutError) as error:
            raise TapeUnusable(f"tape {name} could not be fetched: {error!r}") from error
        if digest(data) != name.rpartition("@")[2]:
            raise TapeUnusable(f"tape {name} was replaced by a newer one")
        return Tape.from_bytes(data, self.key(role_class))
