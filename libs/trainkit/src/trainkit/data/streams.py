"""Streams: datasets that can only be iterated, divided over the processes of a run and the workers of each.

Who divides a stream:

- **the loader**, when the dataset does not divide itself. Every worker of every process iterates the whole stream, in
  the same order, because it draws the same random numbers while it reads. A global batch is the next `batch_size`
  samples of the stream, and a process takes its part of it: the order is the same on any number of processes and
  workers, and all processes end together. Each of them pays for reading the whole stream.
- **the dataset**, when it asks `get_worker_info()` for `num_workers`, or its `worker_init_fn` does. It is then shown
  the workers of all processes, so that it divides itself over the processes too. Each worker reads its share alone.

A dataset that reads the number of its worker and not how many there are, or reads them only after its first sample, is
refused: its workers may yield different samples, of which the loader would take a part.

A stream continues from the dataset's `state_dict` (or that of its iterator, as with torchdata), taken behind each
batch; without one it is read again from the beginning of the epoch, as far as it was read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy, deepcopy
from itertools import chain, count, islice
from types import CodeType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from trainkit.data.counted import AT_END, Counted, Item, leading, length_of
from trainkit.data.loader import Loader
from trainkit.data.workers import presented, started, stay
from trainkit.errors import InvalidData, InvalidSetup
from trainkit.random import Generators, mixed, seeded

if TYPE_CHECKING:
    from trainkit.data.feed import Peers

_log = logging.getLogger("trainkit")

_RANK_NAMES = {"rank", "world_size", "num_replicas", "process_index", "num_processes", "distributed"}
_RANK_CALLS = {"get_rank", "get_world_size", "RANK", "WORLD_SIZE"}


class Stream(Counted):
    """A stream as the loop reads it.

    Args:
        loader: says how the stream is read.
        ready: the stream yields batches, of which a process takes every `world_size`-th.
    """

    by_rows = True

    def __init__(self, loader: Loader, *, ready: bool = False) -> None:
        super().__init__()
        self._loader, self._ready = loader, ready
        self.batch_size, self.drop_last = loader.batch_size, loader.drop_last
        self._seed, self._pin = 0, False
        self._start: Mapping[str, Any] | None = None
        self._state: Mapping[str, Any] | None = None

    def bind(self, *, seed: int, rank: int, world_size: int, device: torch.device, peers: Peers | None = None) -> None:
        """Says which part of the stream is this process's.

        Raises:
            InvalidSetup: it is not clear who divides the stream over the processes, or a process would get nothing.
        """
        super().bind(seed=seed, rank=rank, world_size=world_size, device=device, peers=peers)
        self._loader.check_processes(world_size)
        self._seed, self._pin = seed, self._loader.pins(device)
        if world_size > 1 and self._loader.divided_by is None:
            _refuse_ranks(self._loader.dataset)

    def steps(self, epoch: int) -> int | None:
        """Batches in an epoch as far as the dataset's length says."""
        length = length_of(self._loader.dataset)
        return None if length is None else self._loader.batches_of(length)

    def _looks_ahead(self, epoch: int) -> bool:
        return True  # its length, if it has one, is a promise

    def state_dict(self) -> Mapping[str, Any]:
        return self._state or {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start = self._state = state or None

    def _note(self, state: Mapping[str, Any] | None, ended: bool) -> None:
        if self._last:
            self._state = None
        elif state is not None:
            self._state = state
        elif self._state is None and ended:
            self._state = AT_END

    def _items(self, epoch: int, position: int) -> Iterator[Item]:
        start, self._start = self._start, None
        self._state = start
        if start == AT_END:
            return
        loader, workers = self._loader, max(self._loader.num_workers, 1)
        if start is None and position:
            start = {"divided_by": "loader", "batches": position, "samples": position * loader.batch_size}
        if start is not None:
            start = self._resumed(start, workers)
        reading = _Reading(loader, self._ready, self._seed, epoch, self._rank, self._world, start)
        options: dict[str, Any] = {}
        if loader.num_workers:
            options = {**loader.worker_options, "prefetch_factor": loader.prefetch, "worker_init_fn": stay}
        batches = DataLoader(
            reading,
            batch_size=None,
            num_workers=loader.num_workers,
            collate_fn=_as_it_is,
            pin_memory=self._pin,
            generator=torch.Generator(),  # its own, so that starting an epoch draws nothing from the training process
            **options,
        )
        parts: list[Any] = list(start["parts"]) if start is not None and "parts" in start else [None] * workers
        for read in started(batches):
            state = read.state
            if read.worker is not None:
                parts[read.worker] = state
                following = (read.worker + 1) % workers
                state = {"divided_by": "dataset", "processes": self._world, "next": following, "parts": [*parts]}
            yield Item(read.batch, read.rows, state)

    def _resumed(self, start: Mapping[str, Any], workers: int) -> Mapping[str, Any]:
        """Where to start from.

        Raises:
            InvalidData: the dataset divides itself, and divided itself among others before.
        """
        if start["divided_by"] == "dataset" and (start["processes"], len(start["parts"])) != (self._world, workers):
            raise InvalidData(
                f"cannot resume within this epoch: {_name(self._loader.dataset)} divides itself, and did so over "
                f"{start['processes']} process(es) of {len(start['parts'])} worker(s), of which there are now "
                f"{self._world} of {workers}: use as many, or resume from a checkpoint at the end of an epoch"
            )
        places = start.get("parts", [start])
        if again := max((each["samples"] for each in places if each and "dataset" not in each), default=0):
            _log.warning(
                "resuming within a stream: %s has no state_dict, so %d samples are read again, and they have to be the "
                "same ones",
                *(_name(self._loader.dataset), again),
            )
        return start


class _Read(NamedTuple):
    """A batch from a worker.

    Args:
        worker: that read it, where the dataset divides itself.
        state: of the stream behind the batch.
    """

    batch: Any
    rows: int
    worker: int | None
    state: dict[str, Any]


class _Share:
    """What a dataset is shown of the worker it is in: one of the workers of all processes. Notes who divides by it.

    Attributes:
        asked: the dataset read the number of workers.
        asked_id: it read the worker's own number.
    """

    def __init__(self, worker: int, workers: int, seeds: tuple[int, int], dataset: Any) -> None:
        self.dataset = dataset
        self._worker, self._workers, self._seeds = worker, workers, seeds
        self.asked = self.asked_id = False

    @property
    def unclear(self) -> bool:
        """Whether a dataset that the loader divides looked at which worker it is in."""
        return self._workers > 1 and (self.asked or self.asked_id)

    @property
    def num_workers(self) -> int:
        self.asked = True
        return self._workers

    @property
    def id(self) -> int:
        self.asked_id = True
        return self._worker

    @property
    def seed(self) -> int:
        """The same in all workers, unless the dataset divides itself: the loader divides one order."""
        common, own = self._seeds
        return own if self.asked else common


class _Reading(IterableDataset[_Read]):
    """One epoch of one process, read by each of its workers."""

    def __init__(
        self,
        loader: Loader,
        ready: bool,
        seed: int,
        epoch: int,
        rank: int,
        world: int,
        start: Mapping[str, Any] | None,
    ) -> None:
        self.dataset, self._batch_size, self._drop_last = loader.dataset, loader.batch_size, loader.drop_last
        self._collate = loader.collate or default_collate
        self.worker_init: Callable[[int], object] | None = loader.worker_options.get("worker_init_fn")
        self.divided_by, self._ready = loader.divided_by, ready
        self.seed, self.epoch, self.rank, self.world, self._start = seed, epoch, rank, world, start

    def __iter__(self) -> Iterator[_Read]:
        info: Any = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        start = self._start
        if start is not None and "parts" in start:  # torch asks worker 0 first: it is the one whose turn it was
            worker = (worker + start["next"]) % workers
            start = start["parts"][worker]
        source = _Source(self, worker, workers, info is not None, start)
        if source.divided_by == "loader":
            yield from self._parts(source, worker, workers)
        else:
            yield from self._shares(source, worker)

    def _parts(self, source: _Source, worker: int, workers: int) -> Iterator[_Read]:
        """This process's part of each global batch; a worker takes every `workers`-th one."""
        start: Any = self._start or {"batches": 0, "samples": 0}
        position, samples = start["batches"], start["samples"]
        for turn in count():
            block = source.read(self._batch_size)
            if not block or (self._drop_last and len(block) < self._batch_size):
                return
            samples += len(block)
            first, stop = (len(block) * (self.rank + more) // self.world for more in (0, 1))
            if turn % workers == worker and stop > first:
                batch, rows = self._batch(block[first:stop], (position, self.rank))
                state = {"divided_by": "loader", "batches": position + 1, "samples": samples, **source.state()}
                yield _Read(batch, rows, None, state)
            position += 1

    def _shares(self, source: _Source, worker: int) -> Iterator[_Read]:
        """The batches of a worker that has its share of the stream alone."""
        size = self._batch_size * (self.rank + 1) // self.world - self._batch_size * self.rank // self.world
        start: Any = source.start or {"batches": 0, "samples": 0}
        done, samples = start["batches"], start["samples"]
        while True:
            block = source.read(size)
            if not block or (self._drop_last and len(block) < size):
                return
            done, samples = done + 1, samples + len(block)
            batch, rows = self._batch(block, (done, self.rank, worker))
            yield _Read(batch, rows, worker, {"batches": done, "samples": samples, **source.state()})

    def _batch(self, samples: list[Any], place: tuple[int, ...]) -> tuple[Any, int]:
        with seeded(mixed(self.seed, self.epoch, *place)):
            if not self._ready:
                return self._collate(samples), len(samples)
            batch = self._collate(samples[0])
        return batch, leading(batch)


class _Source:
    """The samples that one worker reads, under random numbers and a worker's number that are the stream's own.

    Attributes:
        divided_by: who divides the stream.
        start: what this worker continues from.

    Raises:
        InvalidData: who divides the stream is another one than in the checkpoint.
    """

    def __init__(
        self, reading: _Reading, worker: int, workers: int, in_worker: bool, start: Mapping[str, Any] | None
    ) -> None:
        self.start = start
        # A worker has a copy. In the training process another iterator may read the same dataset.
        self._dataset: Any = reading.dataset if in_worker else copy(reading.dataset)
        share, shares = worker * reading.world + reading.rank, workers * reading.world
        common, seed = mixed(reading.seed, reading.epoch), mixed(reading.seed, reading.epoch, share)
        self._info: Any = None
        if in_worker and reading.divided_by == "dataset":
            self._info = SimpleNamespace(id=worker, num_workers=workers, seed=seed, dataset=self._dataset)
        elif (in_worker or shares > 1) and reading.divided_by is None:
            self._info = _Share(share, shares, (common, seed), self._dataset)
        self._generators = Generators(common)
        self.divided_by = reading.divided_by
        stored = start is not None and "dataset" in start
        if reading.worker_init is not None and in_worker:
            with self._reading():
                reading.worker_init(share if isinstance(self._info, _Share) else worker)
            self._generators.seed(common)  # it may have drawn or seeded by the worker's number
        with self._reading():
            if hasattr(self._dataset, "set_epoch"):
                self._dataset.set_epoch(reading.epoch)
            self._samples: Iterator[Any] = self._opened(start if stored else None)
        if start is not None and stored:
            self._generators.load_state_dict(start["random"])
        first = self.read(1)  # by now the dataset has asked which worker it is in, if it ever does
        asks = shares > 1 and isinstance(self._info, _Share) and self._info.asked
        self.divided_by = reading.divided_by or ("dataset" if asks else "loader")
        self._refuse_unclear()
        before = self.divided_by if start is None else start.get("divided_by", "dataset")
        if before != self.divided_by:
            raise InvalidData(
                f"cannot resume within this epoch: {_name(reading.dataset)} is divided by the {self.divided_by} and "
                f"was divided by the {before}: use as many processes and workers as before, or resume from a "
                "checkpoint at the end of an epoch"
            )
        if self.divided_by == "dataset" and not stored:  # its shares draw different random numbers
            self._generators.seed(seed)
        self._samples = chain(first, self._samples)
        if start is not None and not stored:
            self._skip(start["samples"])

    def read(self, samples: int) -> list[Any]:
        """The next samples, fewer at the end.

        Raises:
            InvalidData: the loader divides them, and the dataset seems to divide them too.
        """
        with self._reading():
            read = list(islice(self._samples, samples))
        self._refuse_unclear()
        return read

    def _refuse_unclear(self) -> None:
        """Refuses a dataset whose workers may each yield other samples, of which the loader would take a part."""
        info = self._info
        if self.divided_by != "loader" or not isinstance(info, _Share) or not info.unclear:
            return
        what = "num_workers after its first sample" if info.asked else "id and not num_workers"
        raise InvalidData(
            f"{_name(self._dataset)} read get_worker_info().{what}, so it is not clear whether each worker yields a "
            "share of the stream or all of it. Where it divides itself, let it read both at the beginning of __iter__, "
            "or give trainkit.data.Loader(dataset, batch_size, divided_by='dataset') when it divides itself over the "
            "processes too; give divided_by='loader' where every worker yields the same samples"
        )

    def state(self) -> dict[str, Any]:
        """Where the stream is: empty when neither the dataset nor its iterator says."""
        for owner, name in ((self._iterator, "iterator"), (self._dataset, "dataset")):
            if hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict"):
                state = deepcopy(owner.state_dict())
                return {"dataset": state, "of": name, "random": self._generators.state_dict()}
        return {}

    def _skip(self, samples: int) -> None:
        with self._reading():
            for _ in islice(self._samples, samples):
                pass

    def _opened(self, start: Mapping[str, Any] | None) -> Iterator[Any]:
        if start is not None and start["of"] == "dataset":
            self._dataset.load_state_dict(deepcopy(start["dataset"]))
        self._iterator: Any = iter(self._dataset)
        if start is not None and start["of"] == "iterator":
            self._iterator.load_state_dict(deepcopy(start["dataset"]))
        return iter(self._iterator)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._generators, presented(self._info):
            yield


def _as_it_is(read: Any) -> Any:
    return read


def _name(dataset: Any) -> str:
    return f"the {type(dataset).__name__}"


def _refuse_ranks(dataset: Any) -> None:
    """Refuses a dataset that seems to divide itself over processes, which the loader would do once more.

    Raises:
        InvalidSetup: it knows a rank.
    """
    if (found := _knows_ranks(dataset)) is not None:
        raise InvalidSetup(
            f"{_name(dataset)} seems to divide itself over the processes, because it uses {found!r}, and a Loader "
            "divides streams too. Give Loader(dataset, batch_size, divided_by='dataset') when it divides itself over "
            "the processes and over the workers of each; divided_by='loader' when it yields every sample on each; or "
            "let it divide by get_worker_info() alone, which shows the workers of all processes"
        )


def _knows_ranks(dataset: Any, depth: int = 5) -> str | None:
    held: dict[str, Any] = {key: value for key, value in getattr(dataset, "__dict__", {}).items() if value is not None}
    if found := next((name for name in held if name.lstrip("_") in _RANK_NAMES), None):
        return found
    kinds = [kind for kind in type(dataset).__mro__ if kind.__module__.split(".")[0] not in ("torch", "builtins")]
    codes = [code for kind in kinds for each in vars(kind).values() if (code := getattr(each, "__code__", None))]
    if found := next((name for code in codes for name in _names(code) if name in _RANK_CALLS), None):
        return found
    inner = [each for each in held.values() if depth and isinstance(each, IterableDataset)]
    return next((found for each in inner if (found := _knows_ranks(each, depth - 1))), None)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names(constant)
