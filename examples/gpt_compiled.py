"""The small GPT of gpt_bytes.py through torch.compile, whose first step takes long: it compiles.

    trainmover run --nproc-per-node 2 --standbys 1 examples/gpt_compiled.py --steps 60

Needs a C++ compiler on every machine, `g++` or what the variable CXX names: for CPUs torch.compile
writes C++. A standby has compiled everything before it gets a rank, and compiles nothing then.
"""

import argparse
import os
import shutil
import sys

import torch
from gpt_bytes import Bytes, Gpt
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import trainmover


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--batch", type=int, default=8, help="samples a rank and step")
    parser.add_argument("--text-bytes", type=int, default=2_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rebindable", action="store_true", help="see docs/script.md")
    return parser.parse_args()


def train(ctx: trainmover.Context) -> None:
    args = parse()
    torch.manual_seed(args.seed)
    bare = Gpt(args.layers, args.width, heads=4, dropout=0.1)
    model = DistributedDataParallel(torch.compile(bare), process_group=ctx.group("dp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = Bytes(args.text_bytes)

    def loader() -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
        sampler = DistributedSampler(dataset, ctx.size("dp"), ctx.coordinate("dp"), seed=args.seed)
        return DataLoader(dataset, args.batch, sampler=sampler, drop_last=True)

    data = ctx.batches(loader)
    ctx.track(model=model, optimizer=optimizer)
    # Dropout differs between the ranks; the weights above do not.
    ctx.on_assigned(lambda: torch.manual_seed(args.seed * 1000 + ctx.rank))

    for step in ctx.steps(args.steps):
        with step:
            loss = model(*next(data))
            loss.backward()
            step.report(loss=loss)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    if not shutil.which(compiler := os.environ.get("CXX", "g++")):
        sys.exit(
            f"expected the C++ compiler {compiler} in the PATH: install it, or name one in CXX"
        )
    trainmover.run(train, rebindable=parse().rebindable)
