"""`everything.py`, whose rank 1 dies in its second shadow step, while the others add up gradients
with it, and in the set-up after that behind it, while they agree with it whether it was the last.
"""

from everything import die_once, parse, train

import trainmover
from trainmover.runtime.block import Block
from trainmover.runtime.performance import Performance
from trainmover.runtime.shadow import Shadow

RANK = 1
open_block, agreed = Block._open, Shadow._agreed


def dies_in(run: Performance, marker: str) -> None:
    if run.role.live and run.role.rank == RANK:
        die_once(parse().folder / marker)


def dying_in_step(block: Block) -> None:
    if block.shadow and block._run.shadow.count == 2:
        dies_in(block._run, "died-in-step")
    open_block(block)


def dying_behind(shadow: Shadow, stable: bool) -> bool:
    if (parse().folder / "died-in-step").exists():
        dies_in(shadow._run, "died-behind")
    return agreed(shadow, stable)


Block._open = dying_in_step  # type: ignore[assignment, method-assign]
Shadow._agreed = dying_behind  # type: ignore[assignment, method-assign]

if __name__ == "__main__":
    trainmover.run(train)
