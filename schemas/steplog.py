"""What a rank's state was after a step: one line of `--step-digests DIR/rank<r>.jsonl`."""

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from trainmover.schemas.names import Name


class StepLine(BaseModel):
    """Written by the rank once the step is committed; not by one that this left dirty, nor by one
    that died before it could."""

    # A loss may become NaN, which JSON has no number for; pydantic's default null cannot be read.
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    step: NonNegativeInt
    generation: NonNegativeInt
    worker: Name
    digest: str
    """sha256 of everything tracked, hex."""
    objects: dict[str, str]
    """xxh3_128, hex, of each tracked object by its name, and of own state: `rng.<generator>`,
    `batches.<n>`, `ctx.vars`, `buffer.<name>`."""
    numbers: dict[str, float]
    """What `step.report` got, averaged over the ranks in the vote of this step; empty where this
    rank has learned of the commit in another way."""
