"""The training under torchrun: all ranks restart and load a checkpoint that was made every step.

The checkpoint is free: it is written to memory (/dev/shm) after the step's line, so that it takes
part in the time of a normal step, which is subtracted, and in nothing else.
"""

import argparse
import os
from pathlib import Path

from ledger import COMMIT, RANKS, Ledger


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ledger", required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    ledger = Ledger(args.ledger)
    ledger.write("started", rank)
    import torch  # here, since the time it takes is measured
    import torch.distributed as dist
    import training

    ledger.write("imported", rank)
    dist.init_process_group("gloo")
    ledger.write("joined", rank)
    model = torch.nn.parallel.DistributedDataParallel(training.model())
    optimizer = training.optimizer(model)
    first = 0
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["steps"]
    data = training.batches(rank)
    ledger.write("loaded", rank)
    for step in range(first, training.ENDLESS):
        training.loss(model, next(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
        ledger.write(COMMIT, rank, step, RANKS)
        if rank == 0:  # all of the new file or all of the old one, also when it dies in here
            unfinished = args.checkpoint.with_suffix(".unfinished")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "steps": step + 1}, unfinished)
            os.replace(unfinished, args.checkpoint)


if __name__ == "__main__":
    main()
