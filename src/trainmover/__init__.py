"""TrainMover keeps a distributed PyTorch job training when a worker dies.

`run` and `Context` are what a training script uses; they are looked up lazily, so that
importing trainmover in a service does not import torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainmover.runtime.context import Context
    from trainmover.runtime.run import run

__all__ = ["Context", "run"]


def __getattr__(name: str) -> Any:
    if name == "run":
        from trainmover.runtime.run import run

        return run
    if name == "Context":
        from trainmover.runtime.context import Context

        return Context
    raise AttributeError(f"module 'trainmover' has no attribute {name!r}")
