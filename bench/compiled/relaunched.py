"""The training under torchrun: all ranks restart and load a checkpoint that was made every step.

The checkpoint is free: it is written to memory (/dev/shm) after the step's line, so that it takes
part in the time of a normal step, which is subtracted, and in nothing else.
"""

import argparse
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from record import COMMIT, Record


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """What `ctx.batches` is for a plain script."""
    while True:
        yield from loader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--new-machine", type=int, metavar="RANK", help="empty cache after a kill")
    args = parser.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    record = Record(args.record)
    record.write("started", rank)
    import gpt
    import torch  # here, since the time it takes is measured
    import torch.distributed as dist
    from gpt_bytes import Bytes
    from torch.nn.parallel import DistributedDataParallel

    record.write("imported", rank)
    if rank == args.new_machine and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        gpt.forget_what_is_compiled(args.record.parent)
    dist.init_process_group("gloo")
    record.write("joined", rank)
    model = DistributedDataParallel(gpt.model())
    optimizer = gpt.optimizer(model)
    data = endless(gpt.loader(Bytes(2_000_000), rank, size))
    record.write("made", rank)
    first = 0
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["steps"]
    record.write("loaded", rank)
    for step in range(first, gpt.ENDLESS):
        began_s = time.monotonic()
        model(*next(data)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.monotonic() - began_s
        record.write(COMMIT, rank, step, seconds=seconds, graphs=gpt.num_graphs())
        if rank == 0:  # all of the new file or all of the old one, also when it dies in here
            unfinished = args.checkpoint.with_suffix(".unfinished")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "steps": step + 1}, unfinished)
            os.replace(unfinished, args.checkpoint)


if __name__ == "__main__":
    main()
