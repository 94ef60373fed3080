"""What a step costs beyond the training itself: CPU time of opening, vote, extras and commit.

    trainmover run --nproc-per-node 2 --standbys 0 bench/step_cost.py

Rank 0 prints the medians over the steps after the first 50, with their 95 % bootstrap intervals,
in microseconds of CPU time of the training thread: of the whole in even steps, of its parts in odd
ones; the others print the sum alone. A bare `thread_time()` pair stands beside them, the A/A row,
which is in every other row too.
Target (docs/protocol.md): under 500 us a step and rank.
"""

import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import trainmover
from trainmover.runtime.block import Block
from trainmover.runtime.performance import Performance
from trainmover.runtime.tracked import Tracked
from trainmover.runtime.vote import Vote

STEPS, SKIPPED = 400, 50
WHOLE, PARTS = 0, 1
"""What is timed in even steps, and in odd ones: timing the parts would add to the whole."""
SPENT: dict[str, list[float]] = defaultdict(list)


class Now:
    """The step that is open."""

    step = 0


def timed(owner: type, name: str, label: str, turn: int = PARTS) -> None:
    plain: Callable[..., Any] = getattr(owner, name)

    def measured(*args: Any, **kwargs: Any) -> Any:
        if Now.step % 2 != turn:
            return plain(*args, **kwargs)
        started = time.thread_time()
        try:
            return plain(*args, **kwargs)
        finally:
            SPENT[label].append((time.thread_time() - started) * 1e6)

    setattr(owner, name, measured)


def interval(values: list[float]) -> tuple[float, float, float]:
    """Median and its 95 % bootstrap interval."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(400))
    return statistics.median(values), medians[10], medians[-11]


def train(ctx: trainmover.Context) -> None:
    torch.manual_seed(1)
    layers = [nn.Linear(64, 64) for _ in range(24)]  # 48 parameters
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Dropout(0.1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    data = ctx.batches(DataLoader(TensorDataset(torch.randn(512, 64)), 8, shuffle=True))
    ctx.track(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in ctx.steps(STEPS):
        Now.step = step.number
        with step:
            (x,) = next(data)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step.report(loss=loss)
            started = time.thread_time()
            SPENT["a/a: nothing"].append((time.thread_time() - started) * 1e6)
    show(parts=ctx.rank == 0)


def show(*, parts: bool) -> None:
    rows = {k: interval(v[SKIPPED // 2 :]) for k, v in SPENT.items()}
    for label, (median, low, high) in rows.items() if parts else ():
        print(f"{label:<40} {median:8.1f} us  [{low:.1f}, {high:.1f}]")
    total = rows["opening (with late extras)"][0] + rows["gate: extras and vote"][0]
    total += rows["end of block"][0]
    print(f"{'together':<40} {total:8.1f} us")
    if parts:
        print(json.dumps({"rows": rows, "together_us": total}))


if __name__ == "__main__":
    timed(Block, "__enter__", "opening (with late extras)", WHOLE)
    timed(Block, "_vote", "gate: extras and vote", WHOLE)
    timed(Block, "__exit__", "end of block", WHOLE)
    timed(Tracked, "own", "  of it: own state, twice a step")
    timed(Tracked, "open", "  of it: copies at the opening")
    timed(Vote, "vote", "  of it: the vote itself")
    timed(Performance, "committed", "  of it: what is said after a commit")
    trainmover.run(train)
