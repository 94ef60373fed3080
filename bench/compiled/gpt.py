"""The model of examples/gpt_compiled.py and its training, for `trainmover run` and torchrun."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt_bytes import Bytes, Gpt

ENDLESS = 1_000_000
"""Steps: the bench ends the jobs."""
LAYERS, WIDTH, BATCH = 2, 384, 8


def model() -> nn.Module:
    """Compiled at its first call."""
    torch.manual_seed(1)
    bare = Gpt(LAYERS, WIDTH, heads=4, dropout=0.1)
    bare.compile()
    return bare


def optimizer(of: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(of.parameters(), lr=1e-3)


def loader(dataset: Bytes, rank: int, size: int) -> DataLoader[tuple[Tensor, Tensor]]:
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, size, rank, seed=1)
    return DataLoader(dataset, BATCH, sampler=sampler, drop_last=True)


def num_graphs() -> int:
    """That dynamo has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def forget_what_is_compiled(folder: Path) -> None:
    """From here this process has the cache of a machine that has compiled nothing yet."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="empty-cache-", dir=folder)
