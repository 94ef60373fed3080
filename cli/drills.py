"""Which ranks a rehearsal kills, when and at which point of a step: drawn from a seed."""

import random
from collections.abc import Sequence
from itertools import pairwise

from trainmover.cli.incidents import Incident
from trainmover.schemas.fault import POINTS, Fault

KILL_POINTS = tuple(point for point in POINTS if point != "end")
"""Within a step, or right after it."""
WARM_UP = 5
"""The first kill is not in the first 1/5 of the steps, where standbys are still warming up."""


def draw(seed: int, kills: int, *, ranks: int, steps: int) -> tuple[Fault, ...]:
    """Kills in different steps, spread over the run, none in the last one; fewer than `kills`
    where there are too few steps."""
    chance = random.Random(seed)
    first = max(1, steps // WARM_UP)
    room = max(0, steps - 1 - first)
    kills = min(kills, room)
    edges = [first + room * i // kills for i in range(kills + 1)] if kills else []
    return tuple(
        Fault(
            kind="kill",
            rank=chance.randrange(ranks),
            step=chance.randrange(start, end),
            at=chance.choice(KILL_POINTS),
        )
        for start, end in pairwise(edges)
    )


def happened(kills: Sequence[Fault], incidents: Sequence[Incident]) -> tuple[Fault, ...]:
    """Those that led to an incident of their rank; a point may never be reached, as `frame` in a
    script without all_reduce."""
    deaths = [rank for incident in incidents for rank in incident.ranks]
    found = []
    for kill in kills:
        if kill.rank in deaths:
            deaths.remove(kill.rank)
            found.append(kill)
    return tuple(found)
