"""Which workers a machine has and which it must start: names, places, and when to give up."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

QUICK_DEATH_S = 2.0
"""A worker that ends sooner without registering did not fail by chance."""
MAX_QUICK_DEATHS = 5


@dataclass(frozen=True, slots=True)
class Place:
    """A worker of this machine that lives or is about to."""

    worker: str
    local_index: int
    started_s: float
    pid: int = 0
    registered: bool = False


@dataclass(frozen=True, slots=True)
class Roster:
    machine: str
    size: int
    """Workers to keep alive, standbys included."""
    next_number: int = 0
    """Names grow and never repeat within the run: a restarted worker is a new worker."""
    places: dict[str, Place] = field(default_factory=dict)
    quick_deaths: int = 0
    """In a row, without any worker that registered in between."""

    @property
    def gave_up(self) -> bool:
        return self.quick_deaths >= MAX_QUICK_DEATHS

    def missing(self, now_s: float) -> tuple["Roster", tuple[Place, ...]]:
        """The roster with the workers that must be started now, and those workers.

        A worker takes the lowest free local index. After `MAX_QUICK_DEATHS` none is started.
        """
        if self.gave_up:
            return self, ()
        taken = {place.local_index for place in self.places.values()}
        free = [index for index in range(self.size) if index not in taken]
        new = tuple(
            Place(f"{self.machine}-w{self.next_number + n}", index, now_s)
            for n, index in enumerate(free)
        )
        places = {**self.places, **{place.worker: place for place in new}}
        return replace(self, next_number=self.next_number + len(new), places=places), new

    def started(self, worker: str, pid: int) -> "Roster":
        return self._with(replace(self.places[worker], pid=pid))

    def registered(self, worker: str) -> "Roster":
        return replace(self._with(replace(self.places[worker], registered=True)), quick_deaths=0)

    def exited(self, worker: str, now_s: float) -> "Roster":
        place = self.places[worker]
        quick = not place.registered and now_s - place.started_s < QUICK_DEATH_S
        places = {name: other for name, other in self.places.items() if name != worker}
        deaths = self.quick_deaths + 1 if quick else self.quick_deaths
        return replace(self, places=places, quick_deaths=deaths)

    def _with(self, place: Place) -> "Roster":
        return replace(self, places={**self.places, place.worker: place})


def next_number(machine: str, workers: Iterable[str]) -> int:
    """One more than the highest number any worker of the machine ever had."""
    prefix = f"{machine}-w"
    numbers = (w.removeprefix(prefix) for w in workers if w.startswith(prefix))
    return max((int(n) + 1 for n in numbers if n.isdecimal()), default=0)
