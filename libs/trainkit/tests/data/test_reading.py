"""Reading a loader, or what it says of itself, changes nothing for those who read it at the same time."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset
from trainkit import Callback
from trainkit.data import Loader
from trainkit.loop.fit import Fit

from libs.trainkit.tests.data.seen import SLOWLY, Seen
from libs.trainkit.tests.slope import trainer

NUMBERS = TensorDataset(torch.arange(44.0))


class Asking(Callback):
    """Asks for all there is to ask for in mid-epoch, and iterates the training data."""

    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        assert isinstance(fit.feed, Loader)
        for epoch in (0, 3, 5):
            fit.feed.length(epoch), fit.feed.steps(epoch), fit.feed.rows(epoch, 2), fit.feed.samples(epoch, 2)
        fit.totals(), len(fit.feed)
        if fit.state.position in (2, 4):
            assert sum(len(batch[0]) for batch in fit.feed) == 44
            next(iter(fit.feed))


@pytest.mark.parametrize("workers", [0, 1])
def test_asking_in_mid_epoch_does_not_change_the_order_of_the_data(workers: int) -> None:
    runs = [Seen(), Seen()]
    for run, also in zip(runs, ([], [Asking()]), strict=True):
        loader = Loader(NUMBERS, 8, num_workers=workers)
        trainer(train=loader, callbacks=[run, *also], max_duration="2ep", optimizer=SLOWLY).fit()

    quiet, asked = runs
    assert asked.batches == quiet.batches
    assert sorted(asked.samples[:44]) == list(range(44))


@pytest.mark.parametrize("workers", [0, 1])
def test_iterators_that_are_open_together_are_independent(workers: int) -> None:
    loader = Loader(NUMBERS, 8, num_workers=workers)
    alone = [batch[0].tolist() for batch in loader]

    pairs = [(one[0].tolist(), other[0].tolist()) for one, other in zip(loader, loader, strict=True)]

    assert pairs == [(batch, batch) for batch in alone]


def test_what_a_loader_says_of_a_batch_does_not_depend_on_what_was_read() -> None:
    def shorter(epoch: int, generator: torch.Generator) -> range:
        return range(44 - 10 * epoch)

    loader: Any = Loader(NUMBERS, 8, order=shorter)
    list(loader.batches(2))

    assert [loader.samples(0, at) for at in range(loader.steps(0))] == [8, 8, 8, 8, 8, 4]
    assert [loader.samples(1, at) for at in range(loader.steps(1))] == [8, 8, 8, 8, 2]
    assert len(loader) == 6


_IN_FORKS: list[Callable[[], object]] = []
"""What a fork does before anything else."""
os.register_at_fork(after_in_child=lambda: [each() for each in _IN_FORKS])


class Garbage:
    """Part of a cycle; notes the process that collects it."""

    def __init__(self, note: Path) -> None:
        self.note, self.cycle = note, self

    def __del__(self) -> None:
        self.note.write_text(str(os.getpid()))


class Stream(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        return iter((0.0, 1.0, 2.0, 3.0))


@pytest.mark.parametrize("dataset", [[0.0, 1.0, 2.0, 3.0], Stream()], ids=["samples", "stream"])
def test_a_worker_does_not_collect_its_parents_garbage(dataset: Any, tmp_path: Path) -> None:
    note = tmp_path / "collector"
    gc.unfreeze()  # as in a script
    gc.disable()
    _IN_FORKS.append(gc.collect)
    try:
        Garbage(note)
        assert len(list(Loader(dataset, 2, num_workers=1))) == 2
        assert not note.exists()
    finally:
        _IN_FORKS.clear()
        gc.enable()
    gc.collect()
    assert note.read_text() == str(os.getpid())


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_script_froze_stays_frozen(workers: int) -> None:
    gc.freeze()
    assert len(list(Loader([0.0, 1.0, 2.0, 3.0], 2, num_workers=workers))) == 2
    assert gc.get_freeze_count() > 0
