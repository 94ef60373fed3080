"""The training under torchft: one replica group of one rank, healed by its peers.

The communication hook of torchft 0.2.0 (`torchft/ddp.py`) asserts that a failed all-reduce has a
future, which it has not: a peer that dies in the middle of one takes all others with it. `Ddp`
does the same work without that line.
"""

import argparse
import logging
from datetime import timedelta

import torch
import torchft
import training
from ledger import COMMIT, Ledger
from torch import Tensor
from torch.distributed import GradBucket, TCPStore
from torch.futures import Future
from torchft.manager import WorldSizeMode


class Ddp(torchft.DistributedDataParallel):
    @staticmethod
    def _comm_hook(manager: torchft.Manager, bucket: GradBucket) -> Future[Tensor]:
        manager.allreduce(bucket.buffer()).wait()  # in place; tells the manager of an error
        averaged: Future[Tensor] = torch.futures.Future()
        averaged.set_result(bucket.buffer())
        return averaged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ledger", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--timeout-s", type=float, help="of all operations; default: torchft's")
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--spares", action="store_true", help="more replicas than take part")
    args = parser.parse_args()
    logging.basicConfig(format="%(created).3f %(name)s %(message)s", level=logging.INFO)
    ledger = Ledger(args.ledger)
    ledger.write("imported", args.rank)
    timeout = {} if args.timeout_s is None else {"timeout": timedelta(seconds=args.timeout_s)}
    bare = training.model()
    inner = training.optimizer(bare)

    def load(state: dict[str, dict[str, object]]) -> None:
        bare.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(**timeout),
        min_replica_size=args.min_replicas,
        load_state_dict=load,
        state_dict=lambda: {"model": bare.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"rank{args.rank}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        world_size_mode=WorldSizeMode.FIXED_WITH_SPARES if args.spares else WorldSizeMode.DYNAMIC,
        **timeout,
    )
    ledger.write("managed", args.rank)
    model, optimizer = Ddp(manager, bare), torchft.Optimizer(manager, inner)
    data = training.batches(args.rank)
    while True:
        step = manager.current_step()
        optimizer.zero_grad()
        training.loss(model, next(data)).backward()
        optimizer.step()
        if manager.current_step() > step:
            done = manager.current_step() - 1
            ledger.write(COMMIT, args.rank, done, manager.num_participants())


if __name__ == "__main__":
    main()
