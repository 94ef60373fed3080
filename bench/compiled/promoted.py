"""The training under `trainmover run`."""

import argparse
import time
from pathlib import Path
from typing import Any

import gpt
from gpt_bytes import Bytes
from links import anew
from record import COMMIT, SHADOW, Record, training_goes_on
from torch.nn.parallel import DistributedDataParallel

import trainmover


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--rebindable", action="store_true")
    parser.add_argument(
        "--empty-cache", action="store_true", help="of the joiner's compiler, as on a new machine"
    )
    parser.add_argument(
        "--links-anew", action="store_true", help="a move opens all links, not those that change"
    )
    return parser.parse_args()


def train(ctx: trainmover.Context) -> None:
    args = parse()
    record = Record(args.record)
    if args.empty_cache and training_goes_on(args.record):
        gpt.forget_what_is_compiled(args.record.parent)
    model = DistributedDataParallel(gpt.model(), process_group=ctx.group("dp"))
    optimizer = gpt.optimizer(model)
    dataset = Bytes(2_000_000)
    data = ctx.batches(lambda: gpt.loader(dataset, ctx.coordinate("dp"), ctx.size("dp")))
    ctx.track(model=model, optimizer=optimizer)
    for step in ctx.steps(gpt.ENDLESS):
        began_s, cpu_s = time.monotonic(), time.process_time()
        with step:
            model(*next(data)).backward()
            optimizer.step()
            optimizer.zero_grad()
        took: dict[str, Any] = {
            "seconds": time.monotonic() - began_s,
            "cpu_s": time.process_time() - cpu_s,
            "graphs": gpt.num_graphs(),
        }
        if step.shadow:
            record.write(SHADOW, **took)
        elif step.committed:
            record.write(COMMIT, ctx.rank, step.number, **took)


if __name__ == "__main__":
    if parse().links_anew:
        anew()
    trainmover.run(train, rebindable=parse().rebindable)
