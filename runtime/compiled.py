"""torch.compile beside this package: what a compiled function calls of it runs as it is."""

import sys
from functools import cache


def keep_out_of_graphs() -> None:
    """Dynamo compiles no function of `trainmover.runtime`; doing it again changes nothing.

    It would try where DDP calls a group from compiled code, and fails at a group of Python.
    Without dynamo, which optimizers and torch.compile import, there is nothing to do.
    """
    if "torch._dynamo" in sys.modules:
        _skip()


@cache
def _skip() -> None:
    from torch._dynamo import trace_rules

    trace_rules.add("trainmover.runtime")
