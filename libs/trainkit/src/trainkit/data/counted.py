"""Batches whose number of samples is known only once they were read."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from copy import deepcopy
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler

from trainkit.errors import InvalidData
from trainkit.random import unchanged

if TYPE_CHECKING:
    from trainkit.data.feed import Peers

_log = logging.getLogger("trainkit")

_ENDED, _NEVER = 0, -1
_EMPTY = -2
"""What a process says to the others in place of a number of rows: it has no further batch; it never had one; its batch
has no rows."""


_NOTHING = object()

AT_END = {"ended": "this process has no further batch in this epoch"}
"""The state of the data of such a process."""


class Item(NamedTuple):
    """A batch as it was read: its rows on this process, and the state of its source behind it."""

    batch: Any
    rows: int
    state: Mapping[str, Any] | None = None


class Counted:
    """Batches that are counted as they come.

    Where their number is not known before, and on several processes, it reads one batch ahead. Several processes tell
    each other the rows of each batch, so that all of them count the same and end together: a process that has no
    further batch repeats its last one, with 0 rows, until all have ended.

    Attributes:
        present: the samples of the present batch over all processes, and those of this one.
        by_rows: a mean loss counts by its rows; else every batch counts as much as any other.
        fewest: the samples of the present batch on the process that has fewest, of those that have one.
        units, all_units: what the present batch counts in a mean: of this process, and over all of them.
    """

    by_rows = False

    def __init__(self) -> None:
        self._rank, self._world = 0, 1
        self._peers: Peers | None = None
        self.present = (0, 0)
        self.fewest = self.units = self.all_units = 0
        self._last = False

    # What subclasses say

    def _items(self, epoch: int, position: int) -> Iterator[Item]:
        """This process's batches from a position on."""
        raise NotImplementedError

    def _looks_ahead(self, epoch: int) -> bool:
        return self._world > 1 or self.steps(epoch) is None

    def _note(self, state: Mapping[str, Any] | None, ended: bool) -> None:
        """Takes the state behind the present batch, and whether this process has no further one."""

    def steps(self, epoch: int) -> int | None:
        raise NotImplementedError

    # A feed

    def bind(self, *, seed: int, rank: int, world_size: int, device: torch.device, peers: Peers | None = None) -> None:
        self._rank, self._world, self._peers = rank, world_size, peers

    def samples(self, epoch: int, position: int) -> int:
        """Samples in the present batch, over all processes."""
        return self.present[0]

    def rows(self, epoch: int, position: int) -> int:
        """Samples in the present batch of this process."""
        return self.present[1]

    def batches(self, epoch: int, position: int = 0) -> Iterator[Any]:
        """The batches of an epoch from `position` on.

        Raises:
            InvalidData: a batch has no rows, or there are fewer batches than the data's length says.
        """
        items = self._items(epoch, position)
        return self._ahead(items, epoch, position) if self._looks_ahead(epoch) else self._all(items, epoch, position)

    def ends(self, epoch: int, position: int = 0) -> Iterator[bool]:
        """For each of these batches, whether it is the epoch's last."""
        steps = self.steps(epoch)
        if steps is None or self._looks_ahead(epoch):
            return iter(lambda: self._last, None)
        return chain(repeat(False, steps - position - 1), (True,))

    def _all(self, items: Iterator[Item], epoch: int, position: int) -> Iterator[Any]:
        """The batches of one process that knows how many there are."""
        steps = self.steps(epoch)
        assert steps is not None
        before = self.fewest = self.units = self.all_units = 1
        self.present = (1, 1)
        for batch, rows, _ in items:
            if rows != before:  # most batches have as many as the one before
                if rows < 1:
                    raise _no_rows(epoch, position, None)
                self.present = (rows, rows)
                before = self.fewest = rows
            position += 1
            yield batch
        if position < steps:
            raise InvalidData(
                f"the data says that it has {steps} batches, and epoch {epoch} ended after {position}: make its "
                "__len__ agree with what it yields, or leave __len__ out"
            )

    def _ahead(self, items: Iterator[Item], epoch: int, position: int) -> Iterator[Any]:
        filler: Any = None
        with unchanged() if position else nullcontext():  # it was read before the checkpoint, and is read again
            item, counts = self._next(items, False, epoch, position)
        while max(counts) > 0:
            if _NEVER in counts:
                first = next(rank for rank, count in enumerate(counts) if count > 0)
                assert self._peers is not None
                given = self._peers.gather(item.batch if item is not None and self._rank == first else None)[first]
                filler = given if filler is None else filler
            filler = item.batch if item is not None else filler
            present, before = item, [count for count in counts if count > 0]
            item, counts = self._next(items, True, epoch, position + 1)
            rows, samples = present.rows if present is not None else 0, sum(before)
            self.present, self.fewest = (samples, rows), min(before)
            self.units, self.all_units = (rows, samples) if self.by_rows else (min(rows, 1), len(before))
            self._last = max(counts) <= 0
            self._note(present.state if present is not None else None, item is None)
            position += 1
            yield filler

    def _next(
        self, items: Iterator[Item], has_filler: bool, epoch: int, position: int
    ) -> tuple[Item | None, list[int]]:
        """The next batch of this process, if there is one, and how many rows each process has."""
        item = next(items, None)
        if item is None:
            said = _ENDED if has_filler else _NEVER
        else:
            said = item.rows or _EMPTY
        counts = [said] if self._peers is None or self._world == 1 else self._peers.counts(said)
        if _EMPTY in counts:
            raise _no_rows(epoch, position, counts.index(_EMPTY) if self._world > 1 else None)
        return item, counts


class Plain(Counted):
    """An iterable of ready batches. Each process brings its own; every batch weighs the same.

    When it has a length, an epoch has at most so many batches of it, also when it yields more.

    When it has `state_dict` and `load_state_dict`, a resumed run continues exactly; else the batches that were done are
    read again and thrown away, which a warning says.

    Attributes:
        meets_once: processes that have as many batches each meet once in an epoch, at its end, and not at each batch.
            For evaluations, which need the rows of their own process alone, if no step needs the other processes.
    """

    def __init__(self, iterable: Iterable[Any]) -> None:
        super().__init__()
        self.iterable = iterable
        self.meets_once = False
        self._steps: int | None = None
        self._as_long = False
        self._restored = self._ended = self._reported_more = False
        self._state: Mapping[str, Any] | None = None

    def bind(self, *, seed: int, rank: int, world_size: int, device: torch.device, peers: Peers | None = None) -> None:
        super().bind(seed=seed, rank=rank, world_size=world_size, device=device, peers=peers)
        if world_size > 1 and peers is not None:
            lengths = peers.counts(-1 if (own := length_of(self.iterable)) is None else own)
            self._steps = None if -1 in lengths else max(lengths)
            self._as_long = self._steps is not None and min(lengths) == self._steps

    def steps(self, epoch: int) -> int | None:
        return self._steps if self._world > 1 else length_of(self.iterable)

    def batches(self, epoch: int, position: int = 0) -> Iterator[Any]:
        if not (self.meets_once and self._as_long):
            return super().batches(epoch, position)
        return self._meeting_once(self._all(self._items(epoch, position), epoch, position))

    def _meeting_once(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Raises the first process's error in its data on all of them."""
        assert self._peers is not None
        error = None
        try:
            yield from batches
        except InvalidData as found:
            error = found
        if any(self._peers.counts(int(error is not None))):
            told = self._peers.gather(None if error is None else f"on process {self._rank}: {error}")
            raise error or InvalidData(next(each for each in told if each is not None))

    def state_dict(self) -> Mapping[str, Any]:
        if self._state is not None:
            return self._state
        return self.iterable.state_dict() if hasattr(self.iterable, "state_dict") else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state == AT_END:
            self._ended, self._state = True, state
        elif state and hasattr(self.iterable, "load_state_dict"):
            self.iterable.load_state_dict(state)
            self._restored = True

    def resume_problem(self) -> str | None:
        """Why a run cannot resume within an epoch of this data; None where it can."""
        loader = self.iterable
        if not isinstance(loader, DataLoader) or hasattr(loader, "load_state_dict"):
            return None
        if any(hasattr(each, "set_epoch") for each in _orders(loader)):
            return None
        found = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        sampler = getattr(found, "sampler", found)
        if type(sampler) in (SequentialSampler, list, tuple, range):
            return None
        return (
            f"the training data is a {type(loader).__name__} with a {type(sampler).__name__}, whose order cannot be "
            "read again: use one of torch's own samplers, give the sampler a set_epoch(epoch) from which alone its "
            "order follows, or use trainkit.data.Loader(order=...) or torchdata's StatefulDataLoader"
        )

    @property
    def serves_one_iterator(self) -> bool:
        """Whether a second iterator of the iterable moves the first one."""
        source: Any = self.iterable
        return hasattr(source, "state_dict") or (isinstance(source, DataLoader) and source.persistent_workers)

    def _items(self, epoch: int, position: int) -> Iterator[Item]:
        source = self.iterable
        for owner in (source, *_orders(source), getattr(source, "dataset", None)):
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
        skip, self._restored = (0 if self._restored else position), False
        ended, self._ended = self._ended, False
        if ended:
            return iter(())
        if skip:
            if (problem := self.resume_problem()) is not None:
                raise InvalidData(f"cannot resume at batch {skip} of epoch {epoch}: {problem}")
            _log.warning(
                "resuming at batch %d: the training data is a %s without state_dict, so the batches before it are read "
                "again, and they have to be the same ones; a trainkit.data.Loader resumes at once",
                *(skip, type(source).__name__),
            )
        with unchanged() if position else nullcontext():  # what is read again must not draw what training draws next
            batches: Iterator[Any] = iter(source)
            for _ in islice(batches, skip):
                pass
        if (length := length_of(source)) is not None:
            batches = self._bounded(batches, length - position, length)
        if hasattr(source, "state_dict") and self._looks_ahead(epoch):
            return (Item(batch, leading(batch), deepcopy(cast(Any, source).state_dict())) for batch in batches)
        return (Item(batch, leading(batch)) for batch in batches)

    def _bounded(self, batches: Iterator[Any], left: int, length: int) -> Iterator[Any]:
        """As many batches as the length says, whether they are trained or evaluated on, on any number of processes.

        Before the last batch of a source with a state is given, the source is at its end: its state is then that of an
        epoch that is over, while from one before its end it would continue with no batch.
        """
        more, ends_first = _NOTHING, hasattr(self.iterable, "state_dict")
        if left < 1:
            return
        yield from islice(batches, left - 1)
        for batch in islice(batches, 1):
            if ends_first:
                more = next(batches, _NOTHING)
            yield batch
            if not ends_first:
                more = next(batches, _NOTHING)
        if more is not _NOTHING and not self._reported_more:
            self._reported_more = True
            _log.warning(
                "the %s says that it has %d batches and has more: those beyond its length are not read. Make its "
                "__len__ agree with what it yields, or leave __len__ out to read all of them",
                *(type(self.iterable).__name__, length),
            )

    def _note(self, state: Mapping[str, Any] | None, ended: bool) -> None:
        self._state = None if self._last else AT_END if ended else state


def _orders(loader: Any) -> Iterator[Any]:
    """What decides about the order of a DataLoader's samples."""
    batches = getattr(loader, "batch_sampler", None)
    yield from (
        each
        for each in (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
        if each is not None
    )


def length_of(data: Any) -> int | None:
    """The length of data, or None where it has none."""
    try:
        return len(data)
    except TypeError:  # torch's DataLoader has a length only where its dataset has one
        return None


def leading(batch: Any) -> int:
    """The number of rows: the first dimension of the first tensor or array in a batch that has one and is not empty,
    else the length of its first list of plain values; 1 when there is none of them, 0 when all tensors are empty."""
    kind = type(batch)
    if (
        (kind is tuple or kind is list)
        and batch
        and type(batch[0]) is Tensor
        and (shape := batch[0].shape)
        and shape[0]
    ):
        return shape[0]  # of most batches
    found = _leading(batch)
    found = _listed(batch) if found is None else found
    return 1 if found is None else found


def _leading(batch: Any) -> int | None:
    if isinstance(batch, (Tensor, np.ndarray)):
        return batch.shape[0] if batch.ndim else None
    found = None
    for part in _parts(batch):
        rows = _leading(part)
        if rows:
            return rows
        found = rows if found is None else found
    return found


def _listed(batch: Any) -> int | None:
    if isinstance(batch, (list, tuple)) and all(isinstance(each, (str, bytes, int, float)) for each in batch):
        return len(batch)
    return next((rows for part in _parts(batch) if (rows := _listed(part)) is not None), None)


def _parts(batch: Any) -> Iterable[Any]:
    return batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()


def _no_rows(epoch: int, position: int, rank: int | None) -> InvalidData:
    where = "" if rank is None else f" on process {rank}"
    return InvalidData(
        f"the batch at position {position} of epoch {epoch} has no rows{where}: leave out empty batches in the data, "
        "for instance by filtering samples before they are batched"
    )
