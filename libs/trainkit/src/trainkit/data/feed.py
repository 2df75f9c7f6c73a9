"""What the loop reads batches from: a `Loader`, or any iterable made to look like one."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from itertools import chain, islice
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from trainkit.data.loader import Loader


class Feed(Protocol):
    """Batches by place. `Loader` is one."""

    def bind(self, *, seed: int, rank: int, world_size: int, device: torch.device) -> None: ...
    def steps(self, epoch: int) -> int | None: ...
    def samples(self, position: int) -> int: ...
    def rows(self, position: int) -> int: ...
    def batches(self, epoch: int, position: int = 0) -> Iterator[Any]: ...


class Plain:
    """An iterable of ready batches. Each process brings its own; every batch weighs the same.

    When it has `state_dict` and `load_state_dict`, a resumed run goes on exactly; else the batches that were done are
    read again and thrown away, which a warning tells.
    """

    def __init__(self, iterable: Iterable[Any]) -> None:
        self.iterable = iterable
        self._restored = False
        self._rows = 1
        self._world = 1
        self._state: Mapping[str, Any] | None = None

    def bind(self, *, seed: int, rank: int, world_size: int, device: torch.device) -> None:
        self._world = world_size

    def steps(self, epoch: int) -> int | None:
        if not hasattr(self.iterable, "__len__"):
            return None
        try:
            return len(cast(Any, self.iterable))
        except TypeError:  # torch's DataLoader has a length only where its dataset has one
            return None

    def samples(self, position: int) -> int:
        return self._rows * self._world

    def rows(self, position: int) -> int:
        return self._rows

    def batches(self, epoch: int, position: int = 0) -> Iterator[Any]:
        for owner in (self.iterable, getattr(self.iterable, "sampler", None)):
            if owner is not None and hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
        skip, self._restored = (0 if self._restored else position), False
        if skip:
            warnings.warn(
                f"going on at batch {position}: the training data is a {type(self.iterable).__name__} without "
                "state_dict, so the batches before it are read again; a trainkit.Loader goes on at once",
                stacklevel=2,
            )
        batches: Iterator[Any] = islice(iter(self.iterable), skip, None)
        if hasattr(self.iterable, "state_dict") and self.steps(epoch) is None:
            batches = self._noted(batches)
        first = next(batches, None)
        if first is None:
            return batches
        self._rows = leading(first)
        return chain([first], batches)

    def _noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Notes the state behind each batch: without a length, one more is read before the present one is done."""
        before = None
        for batch in batches:
            self._state, before = before, deepcopy(cast(Any, self.iterable).state_dict())
            yield batch
        self._state = None

    def state_dict(self) -> Mapping[str, Any]:
        if self._state is not None:
            return self._state
        return self.iterable.state_dict() if hasattr(self.iterable, "state_dict") else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state and hasattr(self.iterable, "load_state_dict"):
            self.iterable.load_state_dict(state)
            self._restored = True


def feed(source: Iterable[Any]) -> Feed:
    """`source` as the loop reads it."""
    return source if isinstance(source, Loader) else Plain(source)


def leading(batch: Any) -> int:
    """The first dimension of the first tensor in a batch that has one; 1 when there is none."""
    found = _leading(batch)
    return 1 if found is None else found


def _leading(batch: Any) -> int | None:
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((rows for part in parts if (rows := _leading(part)) is not None), None)
