"""The training under `trainmover run`."""

import argparse

import training
from ledger import COMMIT, RANKS, Ledger
from torch.nn.parallel import DistributedDataParallel
from vocabulary import vocabulary

import trainmover


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ledger", required=True)
    parser.add_argument("--rebindable", action="store_true")
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument(
        "--expensive", action="count", default=0, help="a set-up that takes a second; or more"
    )
    parser.add_argument("--state-mb", type=int, default=0, help="more state, which is not trained")
    parser.add_argument("--batch", type=int, default=training.BATCH)
    return parser.parse_args()


def train(ctx: trainmover.Context) -> None:
    args = parse()
    ledger = Ledger(args.ledger)
    for _ in range(args.expensive):
        vocabulary()
    model = DistributedDataParallel(training.model(), process_group=ctx.group("dp"))
    optimizer = training.optimizer(model)
    samples = training.dataset()
    data = ctx.batches(
        lambda: training.loader(samples, ctx.coordinate("dp"), args.loader_workers, args.batch)
    )
    ctx.track(model=model, optimizer=optimizer, frozen=training.frozen(args.state_mb))
    for step in ctx.steps(training.ENDLESS):
        with step:
            training.loss(model, next(data)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.committed and not step.shadow:
            ledger.write(COMMIT, ctx.rank, step.number, RANKS)


if __name__ == "__main__":
    trainmover.run(train, rebindable=parse().rebindable)
