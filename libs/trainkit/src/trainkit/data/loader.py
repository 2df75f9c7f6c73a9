"""`Loader`: torch's DataLoader over an order of samples that needs no memory.

The samples of an epoch are a permutation that follows from (seed, epoch) alone; a batch is a slice of it, by position;
a process takes its part of the slice. So nothing has to be stored but the position, going on in the middle of an epoch
costs the same everywhere, and the global order is the same on any number of processes.

Random numbers used while loading (augmentation, collators) are seeded per batch from (seed, epoch, position, rank):
neither the number of workers nor a restart changes them, and the training process's own generators are not touched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, repeat
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate, get_worker_info

from trainkit.data.workers import start, started
from trainkit.errors import InvalidSetup
from trainkit.random import mixed, seed_here, seeded

if TYPE_CHECKING:
    from trainkit.data.feed import Peers
    from trainkit.data.streams import Stream

Order = Callable[[int, torch.Generator], Sequence[int] | Tensor]
"""The indices of an epoch in order, from the epoch and a generator that is seeded for it."""

_MOST_WORKERS = 1024
"""More is a slip of the keyboard, and starting them takes the machine down."""

_COMPARED = 4096
"""At least so many indices of an order go into its digest: enough to tell orders apart, at a cost that is bounded."""


class Loader:
    """Batches of a dataset.

    Args:
        dataset: with `__len__` and `__getitem__` (or `__getitems__`, which gets a whole list of indices); or a stream,
            which can only be iterated.
        batch_size: samples per step over **all** processes, so that a run means the same on any number of them.
        shuffle: a new order for each epoch; else the dataset's own. The default shuffles what has numbered samples; a
            stream has its own order.
        num_workers: processes that load; 0 loads in the training process.
        collate: makes a batch out of a list of samples; default torch's.
        drop_last: leave out the smaller last batch of an epoch.
        order: gives the indices of an epoch instead of `shuffle`, for instance to draw with weights.
        pin_memory: page-locked memory for faster copies to a GPU; default when there is one.
        prefetch: batches that each worker prepares ahead.
        divided_by: of a stream, who divides it over processes and workers: `loader`, or `dataset`, when it divides
            itself over both. The default finds out whether it divides itself by `get_worker_info().num_workers`; see
            `trainkit.data.streams`.

    Raises:
        InvalidSetup: a value is out of its range or of another kind.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool | None = None,
        num_workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        order: Order | None = None,
        pin_memory: bool | None = None,
        prefetch: int = 2,
        divided_by: Literal["loader", "dataset"] | None = None,
    ) -> None:
        self.is_stream = is_stream(dataset)
        if self.is_stream:
            _check_stream(dataset, shuffle, order, divided_by)
        else:
            _check_samples(dataset, divided_by)
        for name, given, least in (("batch_size", batch_size, 1), ("prefetch", prefetch, 1)):
            if not _whole(given) or given < least:
                raise InvalidSetup(f"{name}={given!r} has to be a whole number of at least {least}")
        if not _whole(num_workers) or not 0 <= num_workers <= _MOST_WORKERS:
            raise InvalidSetup(f"num_workers={num_workers!r} has to be a whole number from 0 to {_MOST_WORKERS}")
        for name, flag in (("shuffle", True if shuffle is None else shuffle), ("drop_last", drop_last)):
            if not isinstance(flag, bool):
                raise InvalidSetup(f"{name} has to be True or False, not {flag!r}")
        for name, call in (("collate", collate), ("order", order)):
            if call is not None and not callable(call):
                raise InvalidSetup(f"{name} is a {type(call).__name__}: give a function, or None")
        self.dataset, self.batch_size, self.num_workers = dataset, batch_size, num_workers
        self.collate, self.drop_last, self.prefetch, self.divided_by = collate, drop_last, prefetch, divided_by
        own = _no_order if self.is_stream else _as_it_is if shuffle is False else _shuffled
        self._order = order or own(dataset)
        self.shuffle = None if order is not None or self.is_stream else shuffle is not False
        self._pin_memory = pin_memory
        self.worker_options: dict[str, Any] = {}
        """Further options of torch's DataLoader for its workers: `worker_init_fn`, `timeout`, ..."""
        self._seed, self._rank, self._world = 0, 0, 1
        self._pin = False
        self._idle: list[DataLoader[Any]] = []
        self._orders: dict[int, Tensor] = {}

    def bind(self, *, seed: int, rank: int, world_size: int, device: torch.device, peers: Peers | None = None) -> None:
        """Says which part of each batch is this process's. The loop calls it before the first epoch."""
        self.check_processes(world_size)
        self._seed, self._rank, self._world = seed, rank, world_size
        self._pin = self.pins(device)
        self._idle, self._orders = [], {}

    def steps(self, epoch: int) -> int:
        """Batches in an epoch."""
        return self.batches_of(len(self._indices_of(epoch)))

    def batches_of(self, samples: int) -> int:
        """Batches that so many samples make."""
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def check_processes(self, world_size: int) -> None:
        """Raises `InvalidSetup` when there are more processes than samples in a batch."""
        if self.batch_size < world_size:
            raise InvalidSetup(
                f"batch_size={self.batch_size} counts the samples of all processes and there are {world_size}: "
                f"give at least {world_size}"
            )

    def pins(self, device: torch.device) -> bool:
        """Whether batches for `device` are made in page-locked memory."""
        return device.type == "cuda" if self._pin_memory is None else self._pin_memory

    def length(self, epoch: int) -> int:
        """Samples in an epoch."""
        return len(self._indices_of(epoch))

    def samples(self, epoch: int, position: int) -> int:
        """Samples in the batch at `position` of an epoch, over all processes."""
        return self._samples(len(self._indices_of(epoch)), position)

    def rows(self, epoch: int, position: int) -> int:
        """Samples of that batch that are this process's. 0: it gets one to keep step with, which must not count."""
        start, stop = self._part(self.samples(epoch, position))
        return stop - start

    def batches(self, epoch: int, position: int = 0) -> Iterator[Any]:
        """The batches of an epoch from `position` on, this process's part of each.

        Each call returns an iterator of its own: reading one changes nothing for the others.
        """
        indices, steps = self._indices_of(epoch), self.steps(epoch)
        return self._read(self._request(indices, epoch, at) for at in range(position, steps))

    def ends(self, epoch: int, position: int = 0) -> Iterator[bool]:
        """For each of these batches, whether it is the epoch's last."""
        return chain(repeat(False, self.steps(epoch) - position - 1), (True,))

    def order_digest(self, epoch: int) -> str:
        """A digest of an epoch's order, to compare it with that of another run."""
        indices = self._indices_of(epoch)
        some = indices[:: max(1, len(indices) // _COMPARED)].contiguous()
        return hashlib.blake2b(some.numpy().tobytes(), digest_size=8).hexdigest()

    def __iter__(self) -> Iterator[Any]:
        """One pass over the first epoch, for use without a `Trainer`."""
        return self._stream().batches(0) if self.is_stream else self.batches(0)

    def __len__(self) -> int:
        steps = self._stream().steps(0) if self.is_stream else self.steps(0)
        if steps is None:
            raise TypeError(f"the stream {type(self.dataset).__name__} has no length")
        return steps

    def _stream(self) -> Stream:
        from trainkit.data.streams import Stream

        return Stream(self)

    def _indices_of(self, epoch: int) -> Tensor:
        """An epoch's order. The last two that were asked for are kept."""
        indices = self._orders.pop(epoch, None)
        if indices is None:
            generator = torch.Generator().manual_seed(mixed(self._seed, epoch))
            indices = torch.as_tensor(self._order(epoch, generator), dtype=torch.int64)
        if len(self._orders) > 1:
            del self._orders[next(iter(self._orders))]
        self._orders[epoch] = indices
        return indices

    def _samples(self, length: int, position: int) -> int:
        return min(self.batch_size, length - position * self.batch_size)

    def _part(self, samples: int) -> tuple[int, int]:
        return samples * self._rank // self._world, samples * (self._rank + 1) // self._world

    def _request(self, indices: Tensor, epoch: int, position: int) -> _Request:
        start, stop = self._part(self._samples(len(indices), position))
        first = position * self.batch_size
        part = indices[first + start : first + stop] if stop > start else indices[first : first + 1]
        return _Request(part.numpy(), (self._seed, epoch, position, self._rank))

    def _read(self, requests: Iterator[_Request]) -> Iterator[Any]:
        # A torch DataLoader and its workers serve one iterator at a time; those that are open together have one each.
        idle = self._idle
        loader = idle.pop() if idle else self._made()
        loader.batch_sampler.requests = requests  # type: ignore[union-attr]
        try:
            yield from started(loader)
        except GeneratorExit:  # its workers answer what they were asked before they begin another pass
            idle.append(loader)
            raise
        idle.append(loader)

    def _made(self) -> DataLoader[Any]:
        options: dict[str, Any] = {}
        if self.num_workers:
            init = partial(start, also=self.worker_options.get("worker_init_fn"))
            options = {"persistent_workers": True, "prefetch_factor": self.prefetch, **self.worker_options}
            options["worker_init_fn"] = init
        return DataLoader(
            _Reader(self.dataset, self.collate),
            batch_sampler=_Requests(),  # type: ignore[arg-type]
            collate_fn=_as_they_are,
            num_workers=self.num_workers,
            pin_memory=self._pin,
            generator=torch.Generator(),  # its own, so that starting an epoch draws nothing from the training process
            **options,
        )


class _Request(NamedTuple):
    """What a worker is asked for: a batch by place."""

    indices: np.ndarray
    """Not a tensor, which would go to a worker through shared memory."""
    place: tuple[int, ...]


class _Requests:
    """The batch sampler of torch's DataLoader, set for each pass."""

    def __init__(self) -> None:
        self.requests: Iterator[_Request] = iter(())

    def __iter__(self) -> Iterator[_Request]:
        return self.requests


class _Reader(Dataset[Any]):
    """Reads and collates one batch under the seed of its place."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any] | None) -> None:
        self.dataset, self._collate = dataset, collate
        # Plain tensors are cut at once instead of sample by sample; nothing random happens there.
        self._tensors = dataset.tensors if type(dataset) is TensorDataset and collate is None else None

    def __getitems__(self, request: _Request) -> Any:
        if self._tensors is not None:
            indices = torch.from_numpy(request.indices)
            return [tensor[indices] for tensor in self._tensors]
        seed = mixed(*request.place)
        if get_worker_info() is not None:
            seed_here(seed)
            return self._read(request.indices.tolist())
        with seeded(seed):
            return self._read(request.indices.tolist())

    def _read(self, indices: list[int]) -> Any:
        whole = getattr(self.dataset, "__getitems__", None)
        samples = whole(indices) if whole else [self.dataset[index] for index in indices]
        return (self._collate or default_collate)(samples)


def _as_they_are(batch: Any) -> Any:
    return batch


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can only be iterated."""
    if isinstance(dataset, type):
        return False
    numbered = hasattr(dataset, "__len__") and (hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__"))
    return isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not numbered)


def _check_samples(dataset: Any, divided_by: Any) -> None:
    found = hasattr(dataset, "__len__") and (hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__"))
    if isinstance(dataset, type) or not found:
        what = f"class {dataset.__name__}, not an instance" if isinstance(dataset, type) else type(dataset).__name__
        raise InvalidSetup(
            f"dataset is a {what}: a Loader finds samples by number, so it needs __len__ and __getitem__; or it "
            "iterates a stream, which needs __iter__"
        )
    if divided_by is not None:
        raise InvalidSetup(f"divided_by={divided_by!r} is of streams: leave it out, the dataset has numbered samples")


def _check_stream(dataset: Any, shuffle: Any, order: Any, divided_by: Any) -> None:
    name = type(dataset).__name__
    if hasattr(dataset, "__next__"):
        raise InvalidSetup(
            f"dataset is a {name}, which can be iterated once: give an object whose __iter__ starts anew"
        )
    if shuffle or order is not None:
        raise InvalidSetup(
            f"dataset is the stream {name}, which has its own order: leave out shuffle and order, and shuffle within "
            "the dataset, for instance by a buffer"
        )
    if divided_by not in (None, "loader", "dataset"):
        raise InvalidSetup(f"divided_by={divided_by!r}: give 'loader', 'dataset' or None")


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _shuffled(dataset: Any) -> Order:
    return lambda epoch, generator: torch.randperm(len(dataset), generator=generator)


def _as_it_is(dataset: Any) -> Order:
    return lambda epoch, generator: torch.arange(len(dataset))


def _no_order(dataset: Any) -> Order:
    def refuse(epoch: int, generator: torch.Generator) -> list[int]:
        raise InvalidSetup(
            f"the stream {type(dataset).__name__} has no samples by number: a Trainer reads it, or iterate the Loader"
        )

    return refuse
