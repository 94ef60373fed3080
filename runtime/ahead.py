"""What a worker was told of a planned switch before anything of it is decided."""

from dataclasses import dataclass

from trainmover.schemas.commands import Freeze, Prepare


@dataclass(slots=True)
class Ahead:
    """Forgotten as a whole by a `Drop`; the seat's lock guards it."""

    prepare: Prepare | None = None
    """Of the joiner: the rank to set up for, and whom to open links to."""
    prepared: int = 0
    """Planned generation for which that is done."""
    error: str = ""
    """Why it could not be done."""
    freeze: int = 0
    """Planned generation for which all ranks are to stop at a boundary."""

    @property
    def due(self) -> Prepare | None:
        """What has still to be prepared."""
        done = self.prepare is None or self.prepared == self.prepare.generation or self.error
        return None if done else self.prepare

    def told(self, command: Prepare | Freeze) -> None:
        """A newer plan replaces an older one; the same command again changes nothing."""
        if isinstance(command, Freeze):
            self.freeze = max(self.freeze, command.generation)
        elif self.prepare is None or self.prepare.generation < command.generation:
            self.prepare, self.prepared, self.error = command, 0, ""

    def ready(self, generation: int) -> None:
        """The joiner stands ready for planned `generation`."""
        if self.prepare is not None and self.prepare.generation == generation:
            self.prepared = generation

    def failed(self, generation: int, error: str) -> None:
        """It cannot be made ready; the mover drops the plan."""
        if self.prepare is not None and self.prepare.generation == generation:
            self.error = error

    def drop(self, generation: int) -> None:
        """Nothing up to planned `generation` will come."""
        if self.prepare is not None and self.prepare.generation <= generation:
            self.prepare, self.prepared, self.error = None, 0, ""
        if self.freeze <= generation:
            self.freeze = 0
