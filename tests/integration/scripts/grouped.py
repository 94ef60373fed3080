"""Trains with groups of its own: one for CPU tensors by the name of gloo, one in another order."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import trainmover


def train(ctx: trainmover.Context) -> None:
    torch.manual_seed(0)
    side = dist.new_group(backend="gloo")
    backwards = dist.new_group([3, 1, 0], sort_ranks=False)
    dist.monitored_barrier(side)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ctx.track(model=model, optimizer=optimizer)
    seen = torch.zeros(1, dtype=torch.int64)
    ranks: list[int | None] = [None] * ctx.world_size
    leader = torch.zeros(1)
    for step in ctx.steps(30):
        with step:
            model(torch.full((4, 8), float(ctx.rank))).square().mean().backward()
            seen.fill_(1 << ctx.rank)
            dist.all_reduce(seen, op=dist.ReduceOp.BOR, group=side)
            dist.all_gather_object(ranks, ctx.rank, group=side)
            leader.fill_(ctx.rank)
            if ctx.rank != 2:
                dist.broadcast(leader, group_src=0, group=backwards)
            optimizer.step()
            optimizer.zero_grad()
    print(f"rank {ctx.rank} saw {seen.item()} {ranks} {leader.item():g}")
    dist.new_group([0, 1])


if __name__ == "__main__":
    trainmover.run(train)
