"""What cannot be tracked is refused with what to use instead."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from trainmover.runtime.tracked import Tracked


def test_a_module_that_shards_by_flat_buffers_is_refused_wherever_it_is() -> None:
    wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapper)
    model = nn.Sequential(nn.Linear(1, 1), wrapper)
    with pytest.raises(TypeError, match=r"model\.1 is a FullyShardedDataParallel.* use .*fully_sh"):
        Tracked().add(model=model)


def test_an_optimizer_that_communicates_is_refused() -> None:
    where = {"__module__": "torch.distributed.optim.zero_redundancy_optimizer"}
    kind = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), where)  # importing it takes seconds
    optimizer = kind([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(TypeError, match=r"optimizer is a ZeroRedundancyOptimizer.* after the vote"):
        Tracked().add(optimizer=optimizer)
