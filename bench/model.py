"""The training that benches share: a small GPT of about 1.3 M parameters on random bytes."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from gpt_bytes import CONTEXT, Gpt

BATCH, LAYERS, WIDTH = 1, 4, 160


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    """What `ctx.batches` is for a plain script."""
    while True:
        yield from loader


class Training:
    """Model, optimizer, schedule and data of one rank; `step` is one update."""

    def __init__(
        self, rank: int, size: int, group: Any, batches: Callable[[Any], Iterator[Any]]
    ) -> None:
        torch.manual_seed(1)
        self.model = DistributedDataParallel(
            Gpt(LAYERS, WIDTH, heads=4, dropout=0.1), process_group=group
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda n: min(1.0, (n + 1) / 20)
        )
        bytes_NL = torch.randint(0, 256, (4096, CONTEXT + 1))
        dataset = TensorDataset(bytes_NL[:, :-1].contiguous(), bytes_NL[:, 1:].contiguous())
        sampler = DistributedSampler(dataset, size, rank, seed=1)
        self._data = batches(DataLoader(dataset, BATCH, sampler=sampler, drop_last=True))

    def step(self) -> Tensor:
        loss: Tensor = self.model(*next(self._data))
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss
