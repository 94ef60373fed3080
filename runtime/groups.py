"""torch process groups over links: stable objects whose members change from inside.

Only the collectives of torch's Python trampolines can be overridden (reference of the C++ header
PyProcessGroup.hpp, torch 2.13); what is missing there raises NotImplementedError at the call.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from trainmover.runtime import collectives
from trainmover.runtime.admission import Issued
from trainmover.runtime.collectives import Ring
from trainmover.runtime.engine import LinkEngine
from trainmover.runtime.exchange import Call, writing
from trainmover.runtime.wire import Op
from trainmover.runtime.work import LinkWork


class LinkGroup(dist.ProcessGroup):
    """One torch process group; lives as long as the job, whoever holds the ranks.

    Methods carry torch's names and signatures. Tensors are dense CPU tensors of any dtype; they may
    be non-contiguous or empty. Each returns a LinkWork.
    """

    def __init__(self, engine: LinkEngine) -> None:
        super().__init__(engine.rank, len(engine.ranks))  # type: ignore[call-arg]
        self.engine = engine
        self._name = self._desc = engine.channel

    # All-to-all patterns on the ring

    def allreduce(self, tensors: Any, opts: Any = None) -> LinkWork:  # type: ignore[override]
        """SUM, AVG, MAX, MIN or PRODUCT, in place."""
        reduce = _reduction(opts)

        def run(call: Call, ring: Ring) -> None:
            for tensor in tensors:
                flat = _flat(tensor)
                collectives.all_reduce(call, ring, flat, reduce)
                _put_back(call, ring, tensor, flat)

        return self._issue(Op.ALL_REDUCE, tensors, tensors, run, _nothing, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> LinkWork:
        """`allreduce` of each tensor."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> LinkWork:  # type: ignore[override]
        """In place on the root; the others keep their values."""
        reduce = _reduction(opts)

        def run(call: Call, ring: Ring) -> None:
            for tensor in tensors:
                flat = _flat(tensor)
                collectives.reduce_to(call, ring, flat, opts.rootRank, reduce)
                _put_back(call, ring, tensor, flat)

        return self._issue(Op.REDUCE, tensors, tensors, run, _nothing, opts)

    def broadcast(self, tensors: Any, opts: Any = None) -> LinkWork:  # type: ignore[override]
        """From `opts.rootRank`, in place."""

        def run(call: Call, ring: Ring) -> None:
            for tensor in tensors:
                flat = _flat(tensor)
                collectives.broadcast(call, ring, flat, opts.rootRank)
                _put_back(call, ring, tensor, flat)

        return self._issue(Op.BROADCAST, tensors, tensors, run, _nothing, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> LinkWork:
        """outputs[i][r] becomes inputs[i] of rank r."""
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

    def all_gather_single(self, output: Tensor, piece: Tensor, opts: Any = None) -> LinkWork:
        """`output` becomes the pieces of all ranks, in rank order."""
        return self.all_gather_single_coalesced([output], [piece], opts)

    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> LinkWork:
        """`all_gather_single` of each pair."""
        _contiguous(outputs)
        rows = [list(output.view(-1).tensor_split(self.size())) for output in outputs]
        return self.allgather(rows, [_flat(piece) for piece in inputs], opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> LinkWork:  # type: ignore[override]
        """outputs[i] becomes the reduction of inputs[i][own rank]."""
        reduce = _reduction(opts)

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
        rows = [list(_flat(source).tensor_split(self.size())) for source in inputs]
        return self.reduce_scatter(outputs, rows, opts)

    def barrier(self, opts: Any = None) -> LinkWork:
        """Completes when every member has come."""
        return self._issue(Op.BARRIER, [], [], collectives.barrier, _nothing, opts)

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
        _contiguous([output])
        received = torch.split(output, list(output_splits) or _even(output, self.size()))
        sent = torch.split(source.contiguous(), list(input_splits) or _even(source, self.size()))
        return self.alltoall(received, sent, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> LinkWork:
        """outputs[r] becomes inputs[own rank] of rank r."""
        return self._pairwise(Op.ALL_TO_ALL, list(inputs), list(outputs), opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> LinkWork:  # type: ignore[override]
        """On the root outputs[0][r] becomes inputs[0] of rank r."""
        sent: list[Tensor | None] = [None] * self.size()
        sent[opts.rootRank] = inputs[0]
        received = list(outputs[0]) if outputs else [None] * self.size()
        return self._pairwise(Op.GATHER, sent, received, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> LinkWork:  # type: ignore[override]
        """outputs[0] becomes inputs[0][own rank] of the root."""
        received: list[Tensor | None] = [None] * self.size()
        received[opts.rootRank] = outputs[0]
        sent = list(inputs[0]) if inputs else [None] * self.size()
        return self._pairwise(Op.SCATTER, sent, received, opts)

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> LinkWork:
        """To one member; sends to one peer keep their order."""

        def run(call: Call, ring: Ring) -> None:
            flat = _flat(tensors[0])
            collectives.send(call, self.engine.pair(call, dstRank, "p2p"), flat)

        lane = f"send-{dstRank}"
        return self._issue(Op.SEND, [], tensors, run, _nothing, None, lane, tag)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> LinkWork:
        """From one member, in the order of its sends; another tag there is an error."""

        def run(call: Call, ring: Ring) -> None:
            flat = _flat(tensors[0])
            link = self.engine.pair(call, srcRank, "p2p")
            collectives.receive(call, link, flat)
            if not tensors[0].is_contiguous():
                with writing(call, link):
                    tensors[0].copy_(flat.view(tensors[0].shape))

        def echo() -> None:
            tensors[0].zero_()

        lane = f"recv-{srcRank}"
        return self._issue(Op.SEND, tensors, tensors, run, echo, None, lane, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> NoReturn:
        """Not supported: which message comes first would differ between attempts of a step."""
        raise NotImplementedError(
            "expected recv() with a source rank, got any source: a step that is done again must "
            "receive in the same order; name the source"
        )

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
    ) -> LinkWork:
        for tensor in (*outputs, *shown):
            if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
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
        inline = opts is not None and not opts.asyncOp
        return self.engine.issue(issued, op, outputs, run, echo, inline, lane, tag)

    def _pairwise(
        self, op: Op, sent: list[Tensor | None], received: list[Tensor | None], opts: Any
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


def _nothing() -> None:
    """The echo of a collective that leaves its tensors as they are."""


def _reduction(opts: Any) -> str:
    name: str = opts.reduceOp.op.name if opts is not None else "SUM"
    if name not in collectives.COMBINE:
        raise NotImplementedError(
            f"expected one of {', '.join(collectives.COMBINE)}, got {name}: reduce with one of them"
        )
    return name


def _flat(tensor: Tensor) -> Tensor:
    """`tensor` as 1-D contiguous memory: its own, or a copy where it is not contiguous."""
    return tensor.detach().contiguous().view(-1)


def _put_back(call: Call, ring: Ring, tensor: Tensor, flat: Tensor) -> None:
    if not tensor.is_contiguous():
        with writing(call, ring.prev):
            tensor.copy_(flat.view(tensor.shape))


def _contiguous(outputs: Sequence[Tensor]) -> None:
    for output in outputs:
        if not output.is_contiguous():
            raise ValueError(
                "expected a contiguous output tensor (torch's own rule for this collective), "
                f"got strides {output.stride()}: call contiguous() first"
            )


def _even(tensor: Tensor, size: int) -> list[int]:
    if tensor.shape[0] % size:
        raise ValueError(
            f"expected a first dimension divisible by {size}, got {tensor.shape[0]}: pass splits"
        )
    return [tensor.shape[0] // size] * size
