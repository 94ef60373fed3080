"""Faults as data: `kill:rank=1,step=5,at=backward` and what it may say.

A fault names a rank and a step, or a worker, whose next step it is then.
"""

from dataclasses import dataclass

POINTS = (
    "forward",
    "backward",
    "frame",
    "extras",
    "vote",
    "result",
    "optimizer",
    "commit",
    "between",
    "end",
)
"""In the order of a step. `frame`: inside a frame of an all_reduce; `extras`: extras sent, not yet
voted; `vote`: voted, no result yet; `result`: the result is known here alone; `optimizer`: half of
the parameters are stepped; `commit`: before the block's end; `between`: after it; `end`: in the
code after the loop."""
KINDS = ("kill", "stop", "cut")


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    rank: int | None = None
    worker: str | None = None
    step: int | None = None
    at: str = "forward"
    bytes: int = 100
    """For `frame`: after how many bytes of it."""

    def __str__(self) -> str:
        """As `parse` reads it."""
        given: dict[str, int | str | None] = {
            "rank": self.rank,
            "worker": self.worker,
            "step": self.step,
            "at": self.at,
        }
        if self.at == "frame":
            given["bytes"] = self.bytes
        return f"{self.kind}:" + ",".join(f"{k}={v}" for k, v in given.items() if v is not None)

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Raises ValueError that shows the form and the known kinds and points."""
        kind, _, rest = text.partition(":")
        fields = dict(part.partition("=")[::2] for part in rest.split(",") if part)
        try:
            at = fields.pop("at", "forward")
            numbers = {k: int(fields.pop(k)) for k in ("rank", "step", "bytes") if k in fields}
            worker = fields.pop("worker", None)
            by_rank = "rank" in numbers and "step" in numbers and worker is None
            by_worker = "rank" not in numbers and worker is not None
            if kind not in KINDS or at not in POINTS or fields or not (by_rank or by_worker):
                raise ValueError
            return cls(kind=kind, worker=worker, at=at, **numbers)
        except ValueError:
            raise ValueError(
                "a fault is KIND:rank=R,step=S[,at=POINT] or KIND:worker=W[,step=S][,at=POINT] "
                f"with KIND of {', '.join(KINDS)} and POINT of {', '.join(POINTS)}; got {text!r}"
            ) from None
