"""Which rank `train` runs for, and going on with the parked call when a standby gets one.

By default a promoted standby runs `train` again from the top (docs/design/standby.md). A script
that promises `rebindable=True` is spared that: nothing that it made before the first step
depends on the rank within its role class, so the parked call goes on. The promise is checked: until
the first step the rank cannot be read, except where it will be asked for again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from trainmover.schemas.layout import Layout
from trainmover.schemas.roles import PIPELINE, RoleClass, RoleClassOf, classes, role_class_of


@dataclass
class Binding:
    """What the script promised and what it left to be done once the rank is fixed."""

    rebindable: bool
    role_class: RoleClassOf | None = None
    """None: by the stages of a pipeline."""
    open: bool = True
    """Set-up: the rank may still change."""
    on_assigned: list[Callable[[], object]] = field(default_factory=list)
    _asking: bool = False
    _stage_known: bool = False
    """The place in the pipeline was asked for and has to stay."""

    def check(self, what: str) -> None:
        """Raises RuntimeError where a rebindable script may not know its rank yet."""
        if self._unknown:
            raise RuntimeError(
                f"{what} is not known before the first step: run(train, rebindable=True) promises "
                "that nothing made until then depends on the rank. Ask for it in a function given "
                "to ctx.batches or ctx.on_assigned, or leave the promise out"
            )

    def check_coordinate(self, axis: str, rank: int, layout: Layout) -> None:
        """`check`, unless the whole role class of `rank` has the same coordinate on `axis`.

        That in the pipeline may be known: then only ranks of that stage are gone on with.
        """
        if not self._unknown:
            return
        if axis == PIPELINE:
            self._stage_known = True
            return
        of_class = [
            layout.coordinate(other, axis)
            for other in range(layout.world_size)
            if self.same_class(layout, rank, other)
        ]
        if layout.size(axis) == 1 or len(set(of_class)) > 1:  # one place by the size says nothing
            self.check(f"ctx.coordinate({axis!r})")

    def classes(self, layout: Layout) -> tuple[RoleClass, ...]:
        """As `schemas.roles.classes`."""
        return classes(layout, self.role_class)

    def same_class(self, layout: Layout, a: int, b: int) -> bool:
        """Whether two ranks run the same program on the same shapes."""
        return role_class_of(a, layout, self.role_class) == role_class_of(
            b, layout, self.role_class
        )

    def can_go_on(self, layout: Layout, a: int, b: int) -> bool:
        """Whether what was made for rank `a` serves rank `b` too, by the promise."""
        stages = [layout.coordinate(rank, PIPELINE) for rank in (a, b) if self._stage_known]
        return self.rebindable and self.same_class(layout, a, b) and len(set(stages)) <= 1

    @property
    def _unknown(self) -> bool:
        return self.rebindable and self.open and not self._asking

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A place that runs again when the rank changes."""
        before, self._asking = self._asking, True
        try:
            yield
        finally:
            self._asking = before

    def assigned(self) -> None:
        """The rank is fixed: run what waited for it."""
        with self.asking():
            for function in self.on_assigned:
                function()
