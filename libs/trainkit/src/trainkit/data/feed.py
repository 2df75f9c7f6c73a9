"""What the loop reads batches from: a `Loader`, or any iterable made to look like one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainkit.data.adopting import adopted, adopted_stream, overridden
from trainkit.data.counted import Counted, Plain
from trainkit.data.loader import Loader
from trainkit.data.streams import Stream


class Peers(Protocol):
    """The processes of a run, as data sees them. A `Strategy` is one."""

    def counts(self, value: int) -> list[int]:
        """A whole number of every process, by rank."""

    def gather(self, value: Any) -> list[Any]:
        """A plain value of every process, by rank."""


class Feed(Protocol):
    """Batches by place. `Loader` is one. Only `batches` may change what it reads from."""

    def bind(
        self, *, seed: int, rank: int, world_size: int, device: torch.device, peers: Peers | None = None
    ) -> None: ...
    def steps(self, epoch: int) -> int | None: ...
    def samples(self, epoch: int, position: int) -> int: ...
    def rows(self, epoch: int, position: int) -> int: ...
    def batches(self, epoch: int, position: int = 0) -> Iterator[Any]: ...
    def ends(self, epoch: int, position: int = 0) -> Iterator[bool]: ...


def feed(source: Iterable[Any], world_size: int = 1) -> Feed:
    """`source` as the loop reads it.

    Raises:
        InvalidSetup: a torch DataLoader has the sampler of another number of processes.
    """
    if isinstance(source, Loader):
        return Stream(source) if source.is_stream else source
    if isinstance(source, DataLoader) and not overridden(source):
        if isinstance(source.dataset, IterableDataset):
            return Stream(adopted_stream(source, world_size), ready=source.batch_size is None)
        return adopted(source, world_size) or Plain(source)
    return Plain(source)


__all__ = ["Counted", "Feed", "Peers", "Plain", "feed"]
