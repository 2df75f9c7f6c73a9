"""torch's DataLoader as a `Loader`, where the order of its samples is torch's own.

torch draws an order when an epoch begins and forgets it: a resumed run would read another one. A `Loader` draws the
same kind of order from (seed, epoch). `batch_size` of a DataLoader counts the samples of one process.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from trainkit.data.loader import Loader, Order
from trainkit.errors import InvalidSetup
from trainkit.random import mixed


def adopted(loader: DataLoader[Any], world_size: int) -> Loader | None:
    """Returns a `Loader` that reads what the DataLoaders of all processes would read, or None when the order is not
    torch's own.

    Raises:
        InvalidSetup: its sampler divides the data over another number of processes.
    """
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        return None
    order = order_of(batches.sampler, batches.batch_size, world_size)
    if order is None:
        return None
    return _loader(loader, batches.batch_size * world_size, drop_last=batches.drop_last, order=order)


def adopted_stream(loader: DataLoader[Any], world_size: int) -> Loader:
    """Returns a `Loader` of the stream that a DataLoader iterates. One that yields batches counts each as a sample."""
    return _loader(loader, (loader.batch_size or 1) * world_size, drop_last=loader.drop_last)


def _loader(loader: DataLoader[Any], batch_size: int, **options: Any) -> Loader:
    own = Loader(
        loader.dataset,
        batch_size,
        collate=None if loader.collate_fn is default_collate else loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory or None,
        prefetch=loader.prefetch_factor or 2,
        **options,
    )
    own.worker_options = worker_options(loader)
    return own


def overridden(loader: DataLoader[Any]) -> bool:
    """Whether a DataLoader reads in its own way: it has a state, or a class overrides how torch iterates."""
    kind = type(loader)
    ways = ("__iter__", "_get_iterator")
    return hasattr(loader, "state_dict") or any(getattr(kind, way) is not getattr(DataLoader, way) for way in ways)


def worker_options(loader: DataLoader[Any]) -> dict[str, Any]:
    """What a DataLoader asks of its workers beyond what `Loader` sets."""
    context = loader.multiprocessing_context
    return {
        "worker_init_fn": loader.worker_init_fn,
        "timeout": loader.timeout,
        **({} if context is None else {"multiprocessing_context": context}),
    }


def order_of(sampler: Iterable[Any], batch_size: int, world_size: int) -> Order | None:
    """The order that one of torch's own samplers, or a plain sequence of indices, stands for; None for any other."""
    if isinstance(sampler, (list, tuple, range)) and all(isinstance(each, int) for each in sampler):
        fixed = torch.tensor(list(sampler), dtype=torch.int64)
        return lambda epoch, generator: fixed
    if type(sampler) is SequentialSampler:
        count = len(sampler.data_source)
        return lambda epoch, generator: torch.arange(count)
    if type(sampler) in (RandomSampler, WeightedRandomSampler, SubsetRandomSampler):
        return lambda epoch, generator: _drawn(sampler, epoch, generator)
    if type(sampler) is DistributedSampler:
        if sampler.num_replicas != world_size:
            raise InvalidSetup(
                f"the DistributedSampler divides the data over {sampler.num_replicas} process(es) and there are "
                f"{world_size}: give num_replicas={world_size}, or leave the sampler out, because the trainer divides "
                "the data of a DataLoader itself"
            )
        return lambda epoch, generator: _of_ranks(sampler, epoch, batch_size)
    return None


def _drawn(sampler: Any, epoch: int, generator: torch.Generator) -> Any:
    """An epoch's draw. A generator of the sampler's own gives the seed in place of the run's."""
    seed = generator.initial_seed() if sampler.generator is None else mixed(sampler.generator.initial_seed(), epoch)
    own = torch.Generator().manual_seed(seed)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return torch.randperm(sampler.num_samples, generator=own)  # a list of so many numbers can be large
    again = copy(sampler)
    again.generator = own
    return list(again)


def _of_ranks(sampler: DistributedSampler[Any], epoch: int, batch_size: int) -> Tensor:
    """Batch by batch what the samplers of all processes give, by rank: each process reads what its own one gives."""
    ranks = []
    for rank in range(sampler.num_replicas):
        one = copy(sampler)
        one.rank = rank
        one.set_epoch(epoch)
        ranks.append(torch.tensor(list(one), dtype=torch.int64))
    batches = torch.stack(ranks).split(batch_size, dim=1)
    return torch.cat([batch.reshape(-1) for batch in batches])
