"""Which interruptions stand: announced, and not cancelled. A fold over the stream."""

from dataclasses import dataclass, replace

from trainmover.schemas.base import Event
from trainmover.schemas.events import InterruptionAnnounced, InterruptionCancelled


@dataclass(frozen=True, slots=True)
class Interruptions:
    standing: tuple[InterruptionAnnounced, ...] = ()
    """Oldest first."""
    cancelled: frozenset[str] = frozenset()
    """Names that nothing brings back, however late their announcement is repeated."""

    def after(self, event: Event) -> "Interruptions":
        """With one more event of the stream."""
        match event:
            case InterruptionAnnounced(interruption=name):
                if name in self.cancelled or any(i.interruption == name for i in self.standing):
                    return self
                return replace(self, standing=(*self.standing, event))
            case InterruptionCancelled(interruption=name):
                kept = tuple(i for i in self.standing if i.interruption != name)
                return Interruptions(kept, self.cancelled | {name})
            case _:
                return self

    def of(self, worker: str, machine: str) -> tuple[InterruptionAnnounced, ...]:
        """Those that ask this worker to give its rank away, and keep others from getting one."""
        return tuple(i for i in self.standing if i.concerns(worker, machine))

    def drains(self, machine: str) -> tuple[InterruptionAnnounced, ...]:
        """Those of the whole machine."""
        return tuple(i for i in self.standing if i.machine == machine)
