"""Where a loader is in its data, and how to go there: by index, or by its own state_dict."""

import copy
import json
from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader, IterableDataset

from trainmover.runtime import codec, rng


class Loader(Protocol):
    """An endless source of batches with a position."""

    epoch: int
    draws_here: bool
    """Batches are made in this process, so drawing one may advance the rank's generators."""

    def draw(self) -> Any: ...
    def where(self) -> bytes: ...
    def go(self, where: bytes) -> None: ...


def adapt(source: Any, seed: int) -> Loader:
    """Raises TypeError for what has no position that can move, ValueError for options that lose it.

    Duck-typed, so that torchdata's StatefulDataLoader needs no import.
    """
    if all(hasattr(source, name) for name in ("__iter__", "state_dict", "load_state_dict")):
        return _ByState(source, seed)
    if isinstance(source, DataLoader) and not isinstance(source.dataset, IterableDataset):
        return _ByIndex(source, seed)
    raise TypeError(
        "ctx.batches expects a torchdata StatefulDataLoader, a torch DataLoader over a map-style "
        "dataset, or an iterable with state_dict and load_state_dict (or a function without "
        f"arguments that makes one); got {type(source).__name__}"
        + (" over an IterableDataset" if isinstance(source, DataLoader) else "")
    )


class _Epochs:
    """Passes over a source, one after the other, each begun on random numbers of its own."""

    def __init__(self, seed: int, targets: list[Any]) -> None:
        self.epoch = 0
        self._seed = seed
        self._iterator: Iterator[Any] | None = None
        unique = {id(t): t for t in targets}.values()
        self._set_epoch = [t.set_epoch for t in unique if callable(getattr(t, "set_epoch", None))]

    def _begin(self, source: Any) -> None:
        for set_epoch in self._set_epoch:
            set_epoch(self.epoch)
        # a DataLoader draws the seed of its workers from the global generator
        with rng.Stream(rng.seed_from(self._seed, self.epoch, "begin")):
            self._iterator = iter(source)

    def _next(self, source: Any) -> Any:
        for _ in range(2):  # a position may be the end of an epoch
            if self._iterator is None:
                self._begin(source)
            assert self._iterator is not None
            try:
                return next(self._iterator)
            except StopIteration:
                self.epoch += 1
                self._iterator = None
                self._ended()
        raise ValueError(f"the loader has no batch in epoch {self.epoch - 1}; expected at least 1")

    def _ended(self) -> None:
        """An epoch is over."""


class _ByIndex(_Epochs):
    """A map-style DataLoader: its position is (epoch, number of batches handed out)."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        samplers = [loader.sampler, loader.batch_sampler]
        samplers.append(getattr(loader.batch_sampler, "sampler", None))
        super().__init__(seed, [*samplers, loader.dataset])
        if loader.num_workers and not loader.in_order:
            raise ValueError(
                "in_order=False makes the order of batches a matter of chance; drop it"
            )
        if loader.persistent_workers and hasattr(loader.dataset, "set_epoch"):
            raise ValueError(
                "persistent_workers=True keeps copies of the dataset that its set_epoch never "
                "reaches; drop one of the two"
            )
        self.draws_here = loader.num_workers == 0
        self._shape = [_size(loader.dataset), loader.batch_size, loader.drop_last]
        self._index = 0
        self._order = _Order(loader, samplers, seed)
        self._loader = copy.copy(loader)
        # past DataLoader.__setattr__: the copy shares all but the order of its indices
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        vars(self._loader).update({name: self._order, "generator": None, "_iterator": None})

    def draw(self) -> Any:
        self._order.at = self.epoch, self._index
        batch = self._next(self._loader)
        self._index += 1
        return batch

    def where(self) -> bytes:
        return json.dumps([self.epoch, self._index, *self._shape]).encode()

    def go(self, where: bytes) -> None:
        epoch, index, *shape = json.loads(where)
        if shape != self._shape:
            raise ValueError(
                "expected a loader as at the donor: [dataset size, batch_size, drop_last] "
                f"{shape}, got {self._shape}; build it from the same arguments on every rank"
            )
        self.epoch, self._index = epoch, index
        self._order.at = epoch, index
        self._begin(self._loader)

    def _ended(self) -> None:
        self._index = 0
        self._order.at = self.epoch, 0


class _ByState(_Epochs):
    """What has state_dict and load_state_dict: its position is its state."""

    def __init__(self, source: Any, seed: int) -> None:
        names = ("sampler", "batch_sampler", "dataset")
        super().__init__(seed, [source, *(getattr(source, name, None) for name in names)])
        self.draws_here = getattr(source, "num_workers", 0) == 0
        self._source = source

    def draw(self) -> Any:
        return self._next(self._source)

    def where(self) -> bytes:
        if self._iterator is None:  # some make their state with their iterator
            self._begin(self._source)
        state = self._source.state_dict()
        return codec.encode({"epoch": self.epoch, "state": state}, "loader")

    def go(self, where: bytes) -> None:
        position = codec.decode(where)
        self.epoch = position["epoch"]
        self._source.load_state_dict(position["state"])
        self._begin(self._source)


class _Order:
    """The indices of a loader from `at` = (epoch, number) on, drawn from a stream of their own."""

    def __init__(self, loader: DataLoader[Any], samplers: list[Any], seed: int) -> None:
        self.at = 0, 0
        self._inner: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._seed = seed
        self._in_workers = loader.num_workers > 0
        used = [s for s in samplers if s is not None]
        self._generators = [
            g for s in [loader, *used] if (g := getattr(s, "generator", None)) is not None
        ]
        # torch's own draw all they need before the first index; a user's may draw at each
        self._draws_once = all(type(s).__module__.startswith("torch.utils.data") for s in used)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        return self._indices(*self.at)

    def _indices(self, epoch: int, start: int) -> Iterator[Any]:
        stream = rng.Stream(rng.seed_from(self._seed, epoch, "order"))
        with stream:
            for generator in self._generators:
                generator.manual_seed(rng.seed_from(self._seed, epoch, "generator"))
            indices = iter(self._inner)
            index = next(indices, _END)
        number = 0
        while index is not _END:
            if number >= start:
                yield self._sent(epoch, number, index) if self._in_workers else index
            if self._draws_once:
                index = next(indices, _END)
            else:
                with stream:
                    index = next(indices, _END)
            number += 1
        if number < start:
            raise ValueError(f"position {start} of epoch {epoch} is past its end at {number}")

    def _sent(self, epoch: int, number: int, index: Any) -> "_Arrival":
        return _Arrival(rng.seed_from(self._seed, epoch, number), index)


_END = object()


class _Arrival:
    """An index on its way to a worker process, whose generators it seeds where it arrives.

    So what a worker draws for a batch is a function of (seed, epoch, batch number), whichever
    worker it is and wherever the loader began. The worker unpickles an index just before its fetch.
    """

    def __init__(self, seed: int, index: Any) -> None:
        self._seed = seed
        self._index = index

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._seed, self._index)


def _arrive(seed: int, index: Any) -> Any:
    rng.seed_all(seed)
    return index


def _size(dataset: Any) -> int | None:
    return len(dataset) if hasattr(dataset, "__len__") else None
