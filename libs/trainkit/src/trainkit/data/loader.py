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
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate, get_worker_info

from trainkit.data.workers import stay
from trainkit.errors import InvalidSetup
from trainkit.random import mixed, seed_here, seeded

Order = Callable[[int, torch.Generator], Sequence[int] | Tensor]
"""The indices of an epoch in order, from the epoch and a generator that is seeded for it."""

_MOST_WORKERS = 1024
"""More is a slip of the keyboard, and starting them takes the machine down."""

_COMPARED = 4096
"""At least so many indices of an order go into its digest: enough to tell orders apart, at a cost that is bounded."""


class Loader:
    """Batches of a dataset.

    Args:
        dataset: with `__len__` and `__getitem__` (or `__getitems__`, which gets a whole list of indices).
        batch_size: samples per step over **all** processes, so that a run means the same on any number of them.
        shuffle: a new order for each epoch; else the dataset's own.
        num_workers: processes that load; 0 loads in the training process.
        collate: makes a batch out of a list of samples; default torch's.
        drop_last: leave out the smaller last batch of an epoch.
        order: gives the indices of an epoch instead of `shuffle`, for instance to draw with weights.
        pin_memory: page-locked memory for faster copies to a GPU; default when there is one.
        prefetch: batches that each worker prepares ahead.

    Raises:
        InvalidSetup: a value is out of its range or of another kind.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = True,
        num_workers: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        order: Order | None = None,
        pin_memory: bool | None = None,
        prefetch: int = 2,
    ) -> None:
        _check_samples(dataset)
        for name, given, least in (("batch_size", batch_size, 1), ("prefetch", prefetch, 1)):
            if not _whole(given) or given < least:
                raise InvalidSetup(f"{name}={given!r} has to be a whole number of at least {least}")
        if not _whole(num_workers) or not 0 <= num_workers <= _MOST_WORKERS:
            raise InvalidSetup(f"num_workers={num_workers!r} has to be a whole number from 0 to {_MOST_WORKERS}")
        for name, flag in (("shuffle", shuffle), ("drop_last", drop_last)):
            if not isinstance(flag, bool):
                raise InvalidSetup(f"{name} has to be True or False, not {flag!r}")
        for name, call in (("collate", collate), ("order", order)):
            if call is not None and not callable(call):
                raise InvalidSetup(f"{name} is a {type(call).__name__}: give a function, or None")
        self.dataset, self.batch_size, self.num_workers = dataset, batch_size, num_workers
        self._collate, self._drop_last, self._prefetch = collate, drop_last, prefetch
        self._order = order or (_shuffled(dataset) if shuffle else _as_it_is(dataset))
        self.shuffle, self.drop_last = None if order is not None else shuffle, drop_last
        self._pin_memory = pin_memory
        self._seed, self._rank, self._world = 0, 0, 1
        self._requests = _Requests()
        self._loader: DataLoader[Any] | None = None
        self._epoch = -1
        self._indices = torch.empty(0, dtype=torch.int64)

    def bind(self, *, seed: int, rank: int, world_size: int, device: torch.device) -> None:
        """Says which part of each batch is this process's. The loop calls it before the first epoch."""
        if self.batch_size < world_size:
            raise InvalidSetup(
                f"batch_size={self.batch_size} counts the samples of all processes and there are {world_size}: "
                f"give at least {world_size}"
            )
        self._seed, self._rank, self._world, self._epoch = seed, rank, world_size, -1
        self._requests = _Requests()
        pin = device.type == "cuda" if self._pin_memory is None else self._pin_memory
        workers: dict[str, Any] = {}
        if self.num_workers:
            workers = {"persistent_workers": True, "prefetch_factor": self._prefetch, "worker_init_fn": stay}
        self._loader = DataLoader(
            _Reader(self.dataset, self._collate),
            batch_sampler=self._requests,  # type: ignore[arg-type]
            collate_fn=_as_they_are,
            num_workers=self.num_workers,
            pin_memory=pin,
            generator=torch.Generator(),  # its own, so that starting an epoch draws nothing from the training process
            **workers,
        )

    def steps(self, epoch: int) -> int:
        """Batches in an epoch."""
        count = len(self._indices_of(epoch))
        return count // self.batch_size if self._drop_last else -(-count // self.batch_size)

    def length(self, epoch: int) -> int:
        """Samples in an epoch."""
        return len(self._indices_of(epoch))

    def samples(self, position: int) -> int:
        """Samples in the batch at `position` of the present epoch, over all processes."""
        return min(self.batch_size, len(self._indices) - position * self.batch_size)

    def rows(self, position: int) -> int:
        """Samples of that batch that are this process's. 0: it gets one to keep step with, which must not count."""
        start, stop = self._part(self.samples(position))
        return stop - start

    def batches(self, epoch: int, position: int = 0) -> Iterator[Any]:
        """The batches of an epoch from `position` on, this process's part of each."""
        if self._loader is None:
            self.bind(seed=0, rank=0, world_size=1, device=torch.device("cpu"))
        assert self._loader is not None
        steps = self.steps(epoch)
        self._requests.made_by = lambda: (self._request(epoch, at) for at in range(position, steps))
        return iter(self._loader)

    def order_digest(self, epoch: int) -> str:
        """A digest of an epoch's order, to compare it with that of another run."""
        indices = self._indices_of(epoch)
        some = indices[:: max(1, len(indices) // _COMPARED)].contiguous()
        return hashlib.blake2b(some.numpy().tobytes(), digest_size=8).hexdigest()

    def __iter__(self) -> Iterator[Any]:
        """One pass over the first epoch, for use without a `Trainer`."""
        return self.batches(0)

    def __len__(self) -> int:
        return self.steps(max(self._epoch, 0))

    def _indices_of(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(mixed(self._seed, epoch))
            self._indices = torch.as_tensor(self._order(epoch, generator), dtype=torch.int64)
            self._epoch = epoch
        return self._indices

    def _part(self, samples: int) -> tuple[int, int]:
        return samples * self._rank // self._world, samples * (self._rank + 1) // self._world

    def _request(self, epoch: int, position: int) -> _Request:
        start, stop = self._part(self.samples(position))
        first = position * self.batch_size
        indices = self._indices[first + start : first + stop] if stop > start else self._indices[first : first + 1]
        return _Request(indices, (self._seed, epoch, position, self._rank))


class _Request(NamedTuple):
    """What a worker is asked for: a batch by place."""

    indices: Tensor
    place: tuple[int, ...]


class _Requests:
    """The batch sampler of torch's DataLoader, set anew for each epoch."""

    def __init__(self) -> None:
        self.made_by: Callable[[], Iterator[_Request]] = lambda: iter(())

    def __iter__(self) -> Iterator[_Request]:
        return self.made_by()


class _Reader(Dataset[Any]):
    """Reads and collates one batch under the seed of its place."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any] | None) -> None:
        self._dataset, self._collate = dataset, collate
        # Plain tensors are cut at once instead of sample by sample; nothing random happens there.
        self._tensors = dataset.tensors if type(dataset) is TensorDataset and collate is None else None

    def __getitems__(self, request: _Request) -> Any:
        if self._tensors is not None:
            return [tensor[request.indices] for tensor in self._tensors]
        seed = mixed(*request.place)
        if get_worker_info() is not None:
            seed_here(seed)
            return self._read(request.indices.tolist())
        with seeded(seed):
            return self._read(request.indices.tolist())

    def _read(self, indices: list[int]) -> Any:
        whole = getattr(self._dataset, "__getitems__", None)
        samples = whole(indices) if whole else [self._dataset[index] for index in indices]
        return (self._collate or default_collate)(samples)


def _as_they_are(batch: Any) -> Any:
    return batch


def _check_samples(dataset: Any) -> None:
    found = hasattr(dataset, "__len__") and (hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__"))
    if isinstance(dataset, type | IterableDataset) or not found:
        what = f"class {dataset.__name__}, not an instance" if isinstance(dataset, type) else type(dataset).__name__
        raise InvalidSetup(
            f"dataset is a {what}: a Loader finds samples by number, so it needs __len__ and __getitem__; data that "
            "can only be gone through is given to the trainer as batches, for instance torch's DataLoader over it"
        )


def _whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _shuffled(dataset: Any) -> Order:
    return lambda epoch, generator: torch.randperm(len(dataset), generator=generator)


def _as_it_is(dataset: Any) -> Order:
    return lambda epoch, generator: torch.arange(len(dataset))
