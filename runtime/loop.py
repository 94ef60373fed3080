"""How long the loop is: the one piece of state that `ctx.steps` itself has.

Tracked like any other object, so that a joiner learns of a `step.stop()` from its donor.
"""

from dataclasses import dataclass


def left_early() -> RuntimeError:
    """What to raise when `train` returns and its loop is not over."""
    return RuntimeError(
        "train returned before the loop of ctx.steps was over (break or return inside it?)"
        ": call step.stop() to end early, so that every rank stops after the same step"
    )


@dataclass
class Loop:
    """`total` updates, and one closing block more where `closing` is set."""

    total: int = 0
    closing: bool = False
    begun: bool = False

    def begin(self, total: int, closing: bool) -> None:
        """Raises RuntimeError the second time."""
        if self.begun:
            raise RuntimeError("ctx.steps may be used once: one loop is one job")
        self.total, self.closing, self.begun = total, closing, True

    @property
    def blocks(self) -> int:
        return self.total + self.closing

    def end_at(self, total: int) -> None:
        """Somebody stopped the loop after so many updates; never makes it longer."""
        self.total = min(self.total, total)

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total, "closing": int(self.closing)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.total, self.closing = state["total"], bool(state["closing"])
