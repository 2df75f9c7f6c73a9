"""Datasets, samplers and loaders of the dialect as trainkit's `Loader`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from trainkit.data import Loader
from trainkit.data.loader import Order, is_stream
from trainkit.dialects.accmt.dataloader_samplers import BaseSampler
from trainkit.dialects.accmt.module import AcceleratorModule
from trainkit.errors import InvalidSetup
from trainkit.random import seeded

_ALONE = SimpleNamespace(num_processes=1, process_index=0)


def train_loader(module: Any, dataset: Any, options: Any, size: int, world: int) -> Iterable[Any]:
    """What is trained on: the module's own loader, else one made from the dataset.

    Raises:
        InvalidSetup: there is neither.
    """
    own = module.get_train_dataloader(dataset)
    if own is not None:
        return adopted(own, world)
    if dataset is None:
        raise InvalidSetup("no training data: give fit a train_dataset, or the module a get_train_dataloader")
    samplers = _listed(options.sampler)
    return Loader(
        dataset,
        size * world,
        shuffle=None if is_stream(dataset) else options.shuffle_train,
        order=drawn(samplers) if samplers else None,
        drop_last=options.dataloader_drop_last,
        collate=_own(module, "collate_fn_train") or options.collate_fn_train or options.collate_fn,
        **_workers(options, world),
    )


def validation_loaders(module: Any, given: Any, options: Any, size: int, world: int) -> dict[str, Iterable[Any]]:
    """What is evaluated on, by key.

    Raises:
        InvalidSetup: an empty list, or keys that cannot be told apart.
    """
    if given is None:
        own = module.get_validation_dataloader(None)
        if isinstance(own, Mapping):
            return {str(key): adopted(each, world) for key, each in own.items()}
        return {} if own is None else {"0": adopted(own, world)}
    if isinstance(given, Mapping):
        sets = {str(key): each for key, each in given.items()}
    else:
        sets = {str(at): each for at, each in enumerate(given if isinstance(given, list | tuple) else [given])}
    if isinstance(given, Mapping) and len(sets) < len(given):
        raise InvalidSetup(f"two keys of val_dataset have the same text: {', '.join(map(repr, given))}")
    if not sets:
        raise InvalidSetup("val_dataset is empty: give at least one dataset, or None")
    if bad := next((key for key in sets if set(key) & set("@/")), None):
        raise InvalidSetup(f"a dataset's key has no '@' and no '/', because rules are written with them: {bad!r}")
    return {key: _validation(module, each, options, size, world) for key, each in sets.items()}


def _validation(module: Any, dataset: Any, options: Any, size: int, world: int) -> Iterable[Any]:
    own = module.get_validation_dataloader(dataset)
    if own is not None:
        return adopted(own, world)
    collate = _own(module, "collate_fn_val") or options.collate_fn_val or options.collate_fn
    shuffle = None if is_stream(dataset) else False
    return Loader(dataset, size * world, shuffle=shuffle, collate=collate, **_workers(options, world))


def _own(module: AcceleratorModule, name: str) -> Any:
    """A method of the module, where it overrides the base class's."""
    return None if getattr(type(module), name) is getattr(AcceleratorModule, name) else getattr(module, name)


def _workers(options: Any, world: int) -> dict[str, Any]:
    workers = world if options.dataloader_num_workers is None else options.dataloader_num_workers
    return {"num_workers": workers, "pin_memory": None if options.dataloader_pin_memory else False}


def adopted(loader: Any, world: int) -> Iterable[Any]:
    """A torch DataLoader's batches as a `Loader`, so that they are shared among processes and a run resumes exactly;
    anything else as it is."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None or isinstance(loader.dataset, IterableDataset):
        return loader  # type: ignore[no-any-return]
    return Loader(
        loader.dataset,
        loader.batch_size * world,
        order=drawn([loader.sampler]),
        collate=loader.collate_fn,
        num_workers=loader.num_workers,
        drop_last=loader.drop_last,
    )


def drawn(samplers: Sequence[Iterable[int]]) -> Order:
    """The indices of samplers one after the other; what is random in them follows from seed and epoch."""

    def order(epoch: int, generator: torch.Generator) -> list[int]:
        for sampler in samplers:
            set_epoch: Callable[[int], None] | None = getattr(sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
        with seeded(generator.initial_seed()):
            return [int(index) for index in itertools.chain(*samplers)]

    return order


def _listed(sampler: Any) -> list[Any]:
    if sampler is None:
        return []
    listed = list(sampler) if isinstance(sampler, list | tuple) else [sampler]
    # The loader divides what is drawn among processes, so it is drawn as one process would.
    return [each(_ALONE) if isinstance(each, BaseSampler) else each for each in listed]
