"""torch.distributed on our groups: registers the backend and makes groups as torch asks."""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import default_pg_timeout

from trainmover.runtime.admission import Mode
from trainmover.runtime.engine import LinkEngine, Wiring
from trainmover.runtime.fence import Revoked
from trainmover.runtime.groups import LinkGroup
from trainmover.runtime.topology import ring_edges

BACKEND = "trainmover"
Attach = Callable[[LinkEngine], None]
_NAMED_RANKS = 32  # longer groups are named by a digest of their ranks

_torchs_monitored_barrier = dist.monitored_barrier
_factory: "GroupFactory | None" = None  # torch's registry of backends is global and so is this


class GroupFactory:
    """Makes the groups of one `init_process_group` and names them alike on all members."""

    def __init__(self, wiring: Wiring, rank: int, attach: Attach | None = None) -> None:
        """`attach` is called with the engine of each group before anything is issued on it."""
        self.groups: list[LinkGroup] = []
        self._rank = rank
        self._wiring = wiring
        self._attach = attach
        self._made: Counter[str] = Counter()

    def make(self, ranks: Sequence[int], timeout: timedelta | None) -> LinkGroup | None:
        """The group of the global `ranks`, in this order; None on a rank that is not among them.

        Registers the group's ring; outside echo mode, once there is a generation, opens its links
        and blocks until the other members came here too. `timeout` limits each of its collectives;
        None and torch's default mean the job's. Raises RuntimeError when set-up is over.
        """
        self._wiring.admission.admit_group(ranks)
        if self._rank not in ranks:
            return None
        channel = self._name(ranks)
        wiring, mesh = self._wiring, self._wiring.mesh
        if mesh is not None:
            mesh.register(channel, ring_edges(ranks))
        if timeout not in (None, default_pg_timeout):
            wiring = replace(wiring, timeout_s=timeout.total_seconds())
        engine = LinkEngine(wiring, channel, ranks, list(ranks).index(self._rank))
        if self._attach is not None:
            self._attach(engine)
        group = LinkGroup(engine, self.make)
        self.groups.append(group)
        live = wiring.admission.mode is not Mode.ECHO and not wiring.fence.revoked
        if mesh is not None and live:
            with suppress(Revoked):  # the switch to the next generation opens what is registered
                mesh.connect(channel, wiring.timeout_s)
        return group

    def rebind(self, rank: int, ranks_of: Mapping[LinkGroup, tuple[int, ...]]) -> None:
        """Move every group, still in echo mode, to the place of another global rank.

        `ranks_of` has the new global ranks of each group, of the same size as before.
        """
        assert self._wiring.mesh is not None
        self._rank = rank
        self._made.clear()
        for group in self.groups:
            ranks, engine = ranks_of[group], group.engine
            channel = self._name(ranks)
            self._wiring.mesh.register(channel, ring_edges(ranks))
            engine.channel, engine.ranks, engine.rank = channel, ranks, ranks.index(rank)
            engine.wiring.mesh = self._wiring.mesh
            places = {r: place for place, r in enumerate(ranks)}
            distributed_c10d._world.pg_group_ranks[group] = places

    def close(self, deadline_s: float) -> None:
        """End the groups' threads; the generation must be revoked or idle."""
        for group in self.groups:
            group.engine.close(deadline_s)
        self.groups.clear()

    def _name(self, ranks: Sequence[int]) -> str:
        members = "-".join(map(str, ranks))
        if len(ranks) > _NAMED_RANKS:
            members = f"{len(ranks)}-{hashlib.sha256(members.encode()).hexdigest()[:16]}"
        count = self._made[members]
        self._made[members] += 1
        return f"{members}#{count}"


def init_torch_distributed(
    wiring: Wiring, rank: int, world_size: int, attach: Attach | None = None
) -> GroupFactory:
    """Initialise torch.distributed with our backend; the calling thread is the training thread.

    The store is local to the process. In echo mode, or before the first generation is open, groups
    are only registered with the mesh; `Mesh.switch` opens their links. `attach`: see GroupFactory.
    """
    global _factory
    factory = _factory = GroupFactory(wiring, rank, attach)
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _make, extended_api=True, devices=["cpu"])
    dist.init_process_group(BACKEND, store=HashStore(), rank=rank, world_size=world_size)
    dist.monitored_barrier = distributed_c10d.monitored_barrier = _monitored_barrier
    return factory


def shutdown_torch_distributed(factory: GroupFactory, deadline_s: float) -> None:
    """Undo `init_torch_distributed`; links stay open until `Mesh.close`."""
    dist.monitored_barrier = distributed_c10d.monitored_barrier = _torchs_monitored_barrier
    if dist.is_initialized():
        dist.destroy_process_group()
    factory.close(deadline_s)


def _make(options: Any, _backend_options: Any) -> LinkGroup:
    """Called by torch for WORLD, and for each `new_group` before torch 2.13."""
    assert _factory is not None, "torch asked for a group before init_torch_distributed"
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    group = _factory.make(ranks, options.timeout)
    assert group is not None, "torch asked for a group that this rank is not in"
    return group


def _monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """torch's own, which asks for the name gloo, for our groups by any name."""
    ours = dist.group.WORLD if group is None else group
    if not isinstance(ours, LinkGroup):
        _torchs_monitored_barrier(group, timeout, wait_all_ranks)
        return
    limit = timedelta(seconds=timeout) if isinstance(timeout, int | float) else timeout
    ours.monitored_barrier(limit, wait_all_ranks)
