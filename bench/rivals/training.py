"""The training that every compared system does: about 1.3 million parameters, DDP and AdamW."""

from collections.abc import Iterator

import torch
from ledger import RANKS
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, LAYERS, BATCH, SAMPLES = 400, 8, 128, 8192
ENDLESS = 1_000_000
"""Steps: the bench ends the jobs."""


def model() -> nn.Module:
    torch.manual_seed(1)
    body: list[nn.Module] = []
    for _ in range(LAYERS):
        body += [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*body, nn.Linear(WIDTH, 1))


def optimizer(of: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(of.parameters(), lr=1e-3)


def frozen(megabytes: int) -> nn.Module:
    """State that moves with the rank and is not trained, in tensors of 1 MB."""
    weights = (torch.full((250_000,), float(number)) for number in range(megabytes))
    return nn.ParameterList(nn.Parameter(weight, requires_grad=False) for weight in weights)


def dataset() -> TensorDataset:
    inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(2))
    return TensorDataset(inputs, inputs.mean(dim=1, keepdim=True))


def loader(
    samples: TensorDataset, rank: int, workers: int = 0, batch: int = BATCH
) -> DataLoader[tuple[Tensor, ...]]:
    sampler = DistributedSampler(samples, RANKS, rank % RANKS)  # a spare trains along
    return DataLoader(samples, batch, sampler=sampler, drop_last=True, num_workers=workers)


def batches(rank: int) -> Iterator[tuple[Tensor, ...]]:
    data = loader(dataset(), rank)
    while True:
        yield from data


def loss(of: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(of(x), y)
