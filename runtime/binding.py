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

PROGRAM_AXES = frozenset({"pp"})
"""Axes along which ranks run different programs: a rebound rank keeps its coordinate there."""


def same_role_class(layout: Layout, a: int, b: int) -> bool:
    """Whether two ranks run the same program on the same shapes."""
    return all(
        layout.coordinate(a, axis.name) == layout.coordinate(b, axis.name)
        for axis in layout.axes
        if axis.name in PROGRAM_AXES
    )


@dataclass
class Binding:
    """What the script promised and what it left to be done once the rank is fixed."""

    rebindable: bool
    open: bool = True
    """Set-up: the rank may still change."""
    on_assigned: list[Callable[[], None]] = field(default_factory=list)
    _asking: bool = False

    def check(self, what: str) -> None:
        """Raises RuntimeError where a rebindable script may not know its rank yet."""
        if self.rebindable and self.open and not self._asking:
            raise RuntimeError(
                f"{what} is not known before the first step: run(train, rebindable=True) promises "
                "that nothing made until then depends on the rank. Ask for it in a function given "
                "to ctx.batches or ctx.on_assigned, or leave the promise out"
            )

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
