"""What two-phase groups save, taken away: every switch closes and opens all links."""

from trainmover.runtime.mesh import Counters, Mesh
from trainmover.runtime.topology import Assignment


def anew() -> None:
    """For all meshes of this process, from here on."""
    switch = Mesh.switch

    def switch_all(self: Mesh, assignment: Assignment, deadline_s: float) -> Counters:
        if assignment.generation > self.generation:  # and not asked once more
            for table in (self._links, self._pairs):
                for link in table.values():
                    link.close()
                table.clear()
        return switch(self, assignment, deadline_s)

    Mesh.switch = switch_all  # type: ignore[method-assign]
