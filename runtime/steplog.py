"""Digests of the tracked state after every committed step, for finding the first that differs."""

from pathlib import Path

from trainmover.runtime.tracked import Tracked
from trainmover.schemas.steplog import StepLine


class StepLog:
    """Appends to `<folder>/rank<r>.jsonl`; does nothing without a folder.

    It costs two passes over all tracked state a step: for tests and `trainmover rehearse`.
    """

    def __init__(self, folder: str, rank: int, worker: str) -> None:
        self._path = Path(folder) / f"rank{rank}.jsonl" if folder else None
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
        self._worker = worker

    def write(
        self, step: int, generation: int, tracked: Tracked, numbers: dict[str, float]
    ) -> None:
        if self._path is None:
            return
        line = StepLine(
            step=step,
            generation=generation,
            worker=self._worker,
            digest=tracked.state_digest(),
            objects=tracked.object_digests() | tracked.own_digests(),
            numbers=numbers,
        )
        with self._path.open("a") as out:
            out.write(line.model_dump_json() + "\n")
