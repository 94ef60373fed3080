"""Which workers a machine has and which it must start: names, places, and when to give up."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

MAX_EARLY_DEATHS = 5
"""Workers in a row that ended before they were of use: more would not fare better."""


@dataclass(frozen=True, slots=True)
class Place:
    """A worker of this machine that lives or is about to."""

    worker: str
    local_index: int
    pid: int = 0
    useful: bool = False
    """It held a rank that was set up, or was a warm standby."""


@dataclass(frozen=True, slots=True)
class Roster:
    machine: str
    size: int
    """Workers to keep alive, standbys included."""
    next_number: int = 0
    """Names grow and never repeat within the run: a restarted worker is a new worker."""
    places: dict[str, Place] = field(default_factory=dict)
    early_deaths: int = 0
    """In a row: workers that ended before they were of use."""

    @property
    def gave_up(self) -> bool:
        return self.early_deaths >= MAX_EARLY_DEATHS

    def missing(self) -> tuple["Roster", tuple[Place, ...]]:
        """The roster with the workers that must be started now, and those workers.

        A worker takes the lowest free local index. After `MAX_EARLY_DEATHS` none is started.
        """
        if self.gave_up:
            return self, ()
        taken = {place.local_index for place in self.places.values()}
        free = [index for index in range(self.size) if index not in taken]
        new = tuple(
            Place(f"{self.machine}-w{self.next_number + n}", index) for n, index in enumerate(free)
        )
        places = {**self.places, **{place.worker: place for place in new}}
        return replace(self, next_number=self.next_number + len(new), places=places), new

    def started(self, worker: str, pid: int) -> "Roster":
        return self._with(replace(self.places[worker], pid=pid))

    def useful(self, worker: str) -> "Roster":
        return replace(self._with(replace(self.places[worker], useful=True)), early_deaths=0)

    def exited(self, worker: str) -> "Roster":
        early = not self.places[worker].useful
        places = {name: place for name, place in self.places.items() if name != worker}
        deaths = self.early_deaths + 1 if early else self.early_deaths
        return replace(self, places=places, early_deaths=deaths)

    def _with(self, place: Place) -> "Roster":
        return replace(self, places={**self.places, place.worker: place})


def next_number(machine: str, workers: Iterable[str]) -> int:
    """One more than the highest number any worker of the machine ever had."""
    prefix = f"{machine}-w"
    numbers = (w.removeprefix(prefix) for w in workers if w.startswith(prefix))
    return max((int(n) + 1 for n in numbers if n.isdecimal()), default=0)
