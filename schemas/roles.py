"""Role classes: which ranks run the same program on the same shapes.

A standby warms up once for each class, as its representative, and stays warm in the most frequent
one. By default the stages of a pipeline differ (axis `pp`), and nothing else does.
"""

from collections.abc import Callable
from dataclasses import dataclass

from trainmover.schemas.layout import Layout

RoleClassOf = Callable[[int, Layout], str]
"""(rank, layout) -> name of the rank's class, the same on every worker."""

PIPELINE = "pp"
MAX_NAME_CHARS = 63


@dataclass(frozen=True, slots=True)
class RoleClass:
    name: str
    representative: int
    """The rank that a standby stands in for, and whose collectives are recorded."""
    count: int


def default_role_class(rank: int, layout: Layout) -> str:
    """`first`, `middle` or `last` along `pp`; `all` without a pipeline."""
    size = next((axis.size for axis in layout.axes if axis.name == PIPELINE), 1)
    if size == 1:
        return "all"
    at = layout.coordinate(rank, PIPELINE)
    return "first" if at == 0 else "last" if at == size - 1 else "middle"


def role_class_of(rank: int, layout: Layout, role_class: RoleClassOf | None = None) -> str:
    """The class of `rank`. Raises ValueError where `role_class` names none that can be told."""
    name = (role_class or default_role_class)(rank, layout)
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise ValueError(
            f"expected role_class(rank, layout) to return a name of 1 to {MAX_NAME_CHARS} "
            f"characters, got {name!r} for rank {rank}"
        )
    return name


def classes(layout: Layout, role_class: RoleClassOf | None = None) -> tuple[RoleClass, ...]:
    """In the order to be warmed: the least frequent first, the most frequent last, where a standby
    stays; of equals `middle` comes last, before it the one with the higher ranks.

    The representative is in the middle of its class: the first rank often writes what others do
    not, and a standby for it would too.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank in range(layout.world_size):
        ranks_of.setdefault(role_class_of(rank, layout, role_class), []).append(rank)
    order = sorted(ranks_of.items(), key=lambda item: (len(item[1]), item[0] == "middle", item[1]))
    return tuple(RoleClass(name, ranks[len(ranks) // 2], len(ranks)) for name, ranks in order)
