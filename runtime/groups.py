"""torch process groups over links: stable objects whose members change from inside.

What torch's C++ calls (functional collectives, DDP) reaches Python only through its trampolines
(PyProcessGroup.hpp, torch 2.13); what torch.distributed calls in Python reaches every method.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.distributed import distributed_c10d

from trainmover.runtime import arguments, collectives, sparse
from trainmover.runtime.aborts import StepAborted
from trainmover.runtime.admission import Issued
from trainmover.runtime.collectives import Ring
from trainmover.runtime.engine import LinkEngine
from trainmover.runtime.exchange import Call, writing
from trainmover.runtime.monitored import monitored_barrier
from trainmover.runtime.wire import Op
from trainmover.runtime.work import LinkWork


class MakeGroup(Protocol):
    """Makes a group of `ranks` (global, in this order); None on a rank that is not among them."""

    def __call__(self, ranks: Sequence[int], timeout: timedelta | None) -> "LinkGroup | None": ...


class LinkGroup(dist.ProcessGroup):
    """One torch process group; lives as long as the job, whoever holds the ranks.

    Methods carry torch's names and signatures. Tensors are CPU tensors of any dtype, for reductions
    of those that torch can reduce (else NotImplementedError); they may be non-contiguous or empty.
    All are dense, but for `allreduce` of sparse COO tensors. Each collective returns a LinkWork.
    """

    def __init__(self, engine: LinkEngine, make: MakeGroup | None = None) -> None:
        """`make` serves `new_group`; without it the group is none that torch makes groups from."""
        super().__init__(engine.rank, len(engine.ranks))  # type: ignore[call-arg]
        self.engine = engine
        self._make = make
        self._name = self._desc = engine.channel
        self._coalescing: list[LinkWork] | None = None

    # All-to-all patterns on the ring

    def allreduce(self, tensors: Any, opts: Any = None) -> LinkWork:  # type: ignore[override]
        """Reduce in place. Sparse COO tensors: SUM and AVG, of what the ranks hold together."""
        reduce = _reduction(opts, tensors)

        def run(call: Call, ring: Ring) -> None:
            for tensor in tensors:
                if tensor.is_sparse:
                    sparse.all_reduce(call, ring, tensor, reduce)
                    continue
                flat = _flat(tensor)
                collectives.all_reduce(call, ring, flat, reduce)
                _put_back(call, ring, tensor, flat)

        return self._issue(Op.ALL_REDUCE, tensors, tensors, run, _nothing, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> LinkWork:
        """`allreduce` of each tensor."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> LinkWork:  # type: ignore[override]
        """In place on the root; the others keep their values."""
        reduce = _reduction(opts, tensors)
        root = arguments.member(Op.REDUCE, opts.rootRank, self.size())

        def run(call: Call, ring: Ring) -> None:
            for tensor in tensors:
                flat = _flat(tensor)
                collectives.reduce_to(call, ring, flat, root, reduce)
                _put_back(call, ring, tensor, flat)

        return self._issue(Op.REDUCE, tensors, tensors, run, _nothing, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> LinkWork:  # type: ignore[override]
        """From `opts.rootRank`, in place."""
        root = arguments.member(Op.BROADCAST, opts.rootRank, self.size())

        def run(call: Call, ring: Ring) -> None:
            for tensor in tensors:
                flat = _flat(tensor)
                collectives.broadcast(call, ring, flat, root)
                _put_back(call, ring, tensor, flat)

        return self._issue(Op.BROADCAST, tensors, tensors, run, _nothing, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> LinkWork:
        """outputs[i][r] becomes inputs[i] of rank r."""
        for row, piece in zip(outputs, inputs, strict=True):
            arguments.one_each(Op.ALL_GATHER, row, self.size(), piece)
        every = [tensor for row in outputs for tensor in row]

        def run(call: Call, ring: Ring) -> None:
            for row, piece in zip(outputs, inputs, strict=True):
                flats = [_flat(tensor) for tensor in row]
                collectives.all_gather(call, ring, _flat(piece), flats)
                for tensor, flat in zip(row, flats, strict=True):
                    _put_back(call, ring, tensor, flat)

        def echo() -> None:
            for row, piece in zip(outputs, inputs, strict=True):
                for tensor in row:
                    tensor.copy_(piece.view_as(tensor))

        return self._issue(Op.ALL_GATHER, every, inputs, run, echo, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> LinkWork:
        """outputs[r][i] becomes inputs[i] of rank r."""
        return self.allgather([list(row) for row in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: Tensor, piece: Tensor, opts: Any = None) -> LinkWork:
        """`output` becomes the pieces of all ranks, in rank order."""
        return self.all_gather_single_coalesced([output], [piece], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> LinkWork:
        """`all_gather_single` of each pair."""
        op = Op.ALL_GATHER
        rows = [
            arguments.pieces(op, arguments.contiguous(op, output), self.size(), piece)
            for output, piece in zip(outputs, inputs, strict=True)
        ]
        return self.allgather(rows, [_flat(piece) for piece in inputs], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> LinkWork:  # type: ignore[override]
        """outputs[i] becomes the reduction of inputs[i][own rank]."""
        reduce = _reduction(opts, outputs)
        for output, row in zip(outputs, inputs, strict=True):
            arguments.one_each(Op.REDUCE_SCATTER, row, self.size(), output)

        def run(call: Call, ring: Ring) -> None:
            for output, row in zip(outputs, inputs, strict=True):
                flat = _flat(output)
                pieces = [_flat(tensor) for tensor in row]
                collectives.reduce_scatter(call, ring, pieces, flat, reduce)
                _put_back(call, ring, output, flat)

        def echo() -> None:
            for output, row in zip(outputs, inputs, strict=True):
                output.copy_(row[self.rank()].view_as(output))

        return self._issue(Op.REDUCE_SCATTER, outputs, outputs, run, echo, opts)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> LinkWork:
        """`output` becomes the reduction of this rank's part of `source`."""
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> LinkWork:
        """`reduce_scatter_single` of each pair."""
        rows = [
            arguments.pieces(Op.REDUCE_SCATTER, source, self.size(), output)
            for output, source in zip(outputs, inputs, strict=True)
        ]
        return self.reduce_scatter(outputs, rows, opts)

    def barrier(self, opts: Any = None) -> LinkWork:
        """Completes when every member has come, within `opts.timeout` if that is set."""

        def run(call: Call, ring: Ring) -> None:
            collectives.barrier(_within(call, opts.timeout if opts else None), ring)

        return self._issue(Op.BARRIER, [], [], run, _nothing, opts)

    # Direct pairs

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> LinkWork:
        """Rows of `source` to every rank, rows of `output` from every rank."""
        op = Op.ALL_TO_ALL
        received = arguments.rows(op, arguments.contiguous(op, output), output_splits, self.size())
        sent = arguments.rows(op, source.contiguous(), input_splits, self.size())
        return self._pairwise(op, sent, received, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> LinkWork:
        """outputs[r] becomes inputs[own rank] of rank r."""
        op, size = Op.ALL_TO_ALL, self.size()
        sent = arguments.one_each(op, inputs, size)
        received = arguments.one_each(op, outputs, size)
        return self._pairwise(op, sent, received, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> LinkWork:  # type: ignore[override]
        """On the root outputs[0][r] becomes inputs[0] of rank r."""
        sent: list[Tensor | None] = [None] * self.size()
        sent[arguments.member(Op.GATHER, opts.rootRank, self.size())] = inputs[0]
        received: list[Tensor | None] = [None] * self.size()
        if outputs:
            received = list(arguments.one_each(Op.GATHER, outputs[0], self.size(), inputs[0]))
        return self._pairwise(Op.GATHER, sent, received, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> LinkWork:  # type: ignore[override]
        """outputs[0] becomes inputs[0][own rank] of the root."""
        received: list[Tensor | None] = [None] * self.size()
        received[arguments.member(Op.SCATTER, opts.rootRank, self.size())] = outputs[0]
        sent: list[Tensor | None] = [None] * self.size()
        if inputs:
            sent = list(arguments.one_each(Op.SCATTER, inputs[0], self.size(), outputs[0]))
        return self._pairwise(Op.SCATTER, sent, received, opts)

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> LinkWork:
        """To one member; sends to one peer keep their order."""
        arguments.member(Op.SEND, dstRank, self.size())

        def run(call: Call, ring: Ring) -> None:
            flat = _flat(tensors[0])
            collectives.send(call, self.engine.pair(call, dstRank, "p2p"), flat)

        lane = f"send-{dstRank}"
        return self._issue(Op.SEND, [], tensors, run, _nothing, None, lane, tag)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> LinkWork:
        """From one member, in the order of its sends; another tag there is an error."""
        arguments.member(Op.SEND, srcRank, self.size())

        def run(call: Call, ring: Ring) -> None:
            flat = _flat(tensors[0])
            link = self.engine.pair(call, srcRank, "p2p")
            collectives.receive(call, link, flat)
            if not _lies(tensors[0]):
                with writing(call, link):
                    tensors[0].copy_(flat.view(tensors[0].shape))

        def echo() -> None:
            # One for integers: torch's pipelining asks its stages so whether they know their shapes
            floating = tensors[0].is_floating_point() or tensors[0].is_complex()
            tensors[0].fill_(0 if floating else 1)

        lane = f"recv-{srcRank}"
        return self._issue(Op.SEND, tensors, tensors, run, echo, None, lane, tag)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Block until every member has come. Group rank 0 names who did not within `timeout` (None:
        the group's), the first or with `wait_all_ranks` all; each member raises RuntimeError."""

        def run(call: Call, ring: Ring) -> None:
            links = partial(self.engine.pair, kind="monitored")
            within = _within(call, timeout)
            monitored_barrier(within, ring.rank, ring.size, links, wait_all_ranks)

        lane = "monitored"  # apart from the collectives that it is to find out about
        self._issue(Op.BARRIER, [], [], run, _nothing, None, lane, inline=True).wait()

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> NoReturn:
        """Not supported: which message comes first would differ between attempts of a step."""
        raise NotImplementedError(
            "expected recv() with a source rank, got any source: a step that is done again must "
            "receive in the same order; name the source"
        )

    # Groups, and what torch asks a backend for

    def new_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_name: str = "",
        group_desc: str | None = None,
    ) -> "LinkGroup | None":
        """torch hands `dist.new_group` to WORLD (torch 2.13), whichever backend it names: gloo and
        nccl would communicate past us. Blocks like `GroupFactory.make`."""
        if self._make is None:
            raise ValueError("expected WORLD to make groups, got another: use dist.new_group()")
        group = self._make(ranks, timeout)
        if group is not None:
            group.setGroupName(group_name)
            group.setGroupDesc(group_desc or "undefined")
            # as torch does for groups that it makes itself: found by their ranks without a tag
            distributed_c10d._world.tags_to_pg.setdefault("", []).append(group)
        return group

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type != "cpu":
            raise RuntimeError(f"expected the device cpu, got {device}: groups are of CPU tensors")
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def _set_sequence_number_for_group(self) -> None:
        """Counts from the start of each generation."""

    def _get_sequence_number_for_group(self) -> int:
        return self.engine.issued

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> "Together":
        works, self._coalescing = self._coalescing or [], None
        return Together(works)

    # Names (torch's C++ asks for them by both spellings)

    def getBackendName(self) -> str:
        """The name that the backend is registered under."""
        return "trainmover"

    def getRank(self) -> int:
        """Of this process in the group; another one after `rebind`."""
        return self.engine.rank

    def getGroupName(self) -> str:
        """torch's name of the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set by torch after the group was made."""
        self._name = name

    def getGroupDesc(self) -> str:
        """A description for logs."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        """Set by torch after the group was made."""
        self._desc = desc

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc
    # The names before torch 2.13
    _allgather_base = all_gather_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def shutdown(self) -> None:
        """Nothing: a peer may still be in its last collective; the runtime closes the links."""

    def abort(self) -> None:
        """Nothing: generations end through the fence, for all groups at once."""

    def _issue(
        self,
        op: Op,
        outputs: list[Tensor],
        shown: Sequence[Tensor],
        run: Callable[[Call, Ring], None],
        echo: Callable[[], None],
        opts: Any,
        lane: str = "ring",
        tag: int = 0,
        inline: bool = False,
    ) -> LinkWork:
        for tensor in (*outputs, *shown):
            sparse_sum = op is Op.ALL_REDUCE and tensor.is_sparse
            if tensor.device.type != "cpu" or not (tensor.layout is torch.strided or sparse_sum):
                raise NotImplementedError(
                    f"expected dense CPU tensors for {op.name} on group {self.engine.channel}, "
                    f"got {tensor.layout} on {tensor.device}: move or densify them first"
                )
        first = shown[0] if shown else None
        issued = Issued(
            self.engine.channel,
            op.name.lower(),
            str(first.dtype) if first is not None else "",
            tuple(first.shape) if first is not None else (),
        )
        inline = inline or (opts is not None and not opts.asyncOp)
        try:
            work = self.engine.issue(issued, op, outputs, run, echo, inline, lane, tag)
        except StepAborted:
            # it unwinds the caller's _coalescing_manager too, which would not clean up after it
            distributed_c10d._world.pg_coalesce_state.clear()
            self._coalescing = None
            raise
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _pairwise(
        self,
        op: Op,
        sent: Sequence[Tensor | None],
        received: Sequence[Tensor | None],
        opts: Any,
    ) -> LinkWork:
        outputs = [tensor for tensor in received if tensor is not None]
        shown = [tensor for tensor in (*sent, *received) if tensor is not None]

        def run(call: Call, ring: Ring) -> None:
            going = [None if t is None else _flat(t) for t in sent]
            coming = [None if t is None else _flat(t) for t in received]
            links = partial(self.engine.pair, call, kind="pairs")
            collectives.pairwise(call, ring, links, going, coming)
            for tensor, flat in zip(received, coming, strict=True):
                if tensor is not None and flat is not None:
                    _put_back(call, ring, tensor, flat)

        def echo() -> None:
            own = next((t for t in (sent[self.rank()], *sent) if t is not None), None)
            for tensor in outputs:
                if own is not None and own.numel() == tensor.numel():
                    tensor.copy_(own.view_as(tensor))
                else:
                    tensor.zero_()

        return self._issue(op, outputs, shown[:1], run, echo, opts)


class Together(Work):
    """The works of one coalesced block as one."""

    def __init__(self, works: Sequence[LinkWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all have ended, each for `timeout` at most."""
        return all([work.wait(timeout) for work in self._works])

    def is_completed(self) -> bool:
        """Whether all have ended."""
        return all(work.is_completed() for work in self._works)


def _nothing() -> None:
    """The echo of a collective that leaves its tensors as they are."""


def _within(call: Call, timeout: timedelta | None) -> Call:
    """`call` with a limit of its own; torch's for "none given" is negative."""
    if timeout is None or timeout < timedelta(0):
        return call
    limit_s = timeout.total_seconds()
    return call._replace(deadline=time.monotonic() + limit_s, timeout_s=limit_s)


def _reduction(opts: Any, tensors: Sequence[Tensor]) -> str:
    """The name of the reduction; raises NotImplementedError where it cannot be had."""
    name: str = opts.reduceOp.op.name if opts is not None else "SUM"
    if name not in collectives.COMBINE:
        raise NotImplementedError(
            f"expected one of {', '.join(collectives.COMBINE)}, got {name}: reduce with one of them"
            " (for PREMUL_SUM multiply the tensor, then SUM)"
        )
    for tensor in tensors:
        if not collectives.reduces(name, tensor.dtype):
            raise NotImplementedError(
                f"expected a dtype that torch reduces by {name} on CPU, got {tensor.dtype}: cast "
                "the tensor first"
            )
        if tensor.is_sparse and name not in sparse.REDUCTIONS:
            raise NotImplementedError(
                f"expected one of {', '.join(sparse.REDUCTIONS)} for a sparse tensor, got {name}: "
                "densify it first"
            )
    return name


def _flat(tensor: Tensor) -> Tensor:
    """`tensor` as 1-D contiguous memory: its own if it `_lies` there, else a copy."""
    if not _lies(tensor):
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor.detach().view(-1)


def _lies(tensor: Tensor) -> bool:
    """Whether the memory of `tensor` holds its values, one after the other."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _put_back(call: Call, ring: Ring, tensor: Tensor, flat: Tensor) -> None:
    if not _lies(tensor):
        with writing(call, ring.prev):
            tensor.copy_(flat.view(tensor.shape))
