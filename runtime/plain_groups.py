"""torch.distributed of a script that no job protects."""

from typing import Protocol

import torch
import torch.distributed as dist

from trainmover.runtime.admission import Admission
from trainmover.runtime.backend import init_torch_distributed, shutdown_torch_distributed
from trainmover.runtime.engine import Wiring
from trainmover.runtime.fence import Fence


class Groups(Protocol):
    """Initialised by its constructor; `close` destroys it, if user code has not."""

    device: torch.device
    agreeing: dist.ProcessGroup | None
    """For what ranks agree on in each block, of CPU tensors; None: there is nobody to ask."""

    def close(self) -> None: ...


class OneRank:
    """A process alone: its groups answer by themselves, refuse what a job refuses (`admission`),
    and listen nowhere."""

    def __init__(self, admission: Admission) -> None:
        self.device = torch.device("cpu")
        self.agreeing: dist.ProcessGroup | None = None
        self._fence = Fence()
        wiring = Wiring(
            mesh=None,
            fence=self._fence,
            admission=admission,
            on_poisoned=_never,
            on_broken=_never,
        )
        self._factory = init_torch_distributed(wiring, rank=0, world_size=1)

    def close(self) -> None:
        shutdown_torch_distributed(self._factory, deadline_s=5)
        self._fence.close()


class Launched:
    """Plain groups of the processes that torchrun, or whoever sets its variables, has started.

    gloo on CPU; with CUDA nccl, on the device of the local rank. Blocks until all ranks are there.
    """

    def __init__(self, local_rank: int) -> None:
        self.device = torch.device("cpu")
        backend = "gloo"
        if torch.cuda.is_available():
            self.device, backend = torch.device("cuda", local_rank), "nccl"
            torch.cuda.set_device(self.device)
            torch.cuda.init()  # type: ignore[no-untyped-call] # seeded with the rest
        dist.init_process_group(backend, init_method="env://")
        self.agreeing: dist.ProcessGroup | None = (
            dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        )

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def _never(*_: object) -> None:
    raise AssertionError("expected no peer to lose, since this process is the only rank")
