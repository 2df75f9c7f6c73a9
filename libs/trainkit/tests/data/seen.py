"""Which samples a run reads, also one that ends in mid-epoch and resumes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from trainkit import Callback, Checkpoints
from trainkit.loop.fit import Fit

from libs.trainkit.tests.slope import trainer

SLOWLY = partial(torch.optim.SGD, lr=1e-6)
"""Samples are numbers of any size here."""


class Seen(Callback):
    """Notes the samples of every batch that counts. It ends the run after a step, like a kill would."""

    def __init__(self, die_after: int | None = None) -> None:
        self.batches: list[list[float]] = []
        self._die_after = die_after

    def on_step_start(self, fit: Fit, batch: Any) -> None:
        if fit.state.step == self._die_after:
            raise KeyboardInterrupt
        rows = batch[0] if isinstance(batch, (list, tuple)) else batch
        self.batches.append(torch.atleast_1d(rows).tolist() if fit.window.rows else [])

    @property
    def samples(self) -> list[float]:
        return [sample for batch in self.batches for sample in batch]


def seen(make: Callable[[], Any], folder: Path | None = None, die_after: int | None = None, **options: Any) -> Seen:
    """Trains on new data from `make`, with checkpoints in `folder`, from which it resumes."""
    found = Seen(die_after)
    checkpoints = None if folder is None else Checkpoints(folder=folder, every=f"{die_after or 1000}st")
    settings = {"max_duration": "2ep", "log_every": None, "optimizer": SLOWLY, **options}
    try:
        trainer(train=make(), callbacks=[found], checkpoints=checkpoints, **settings).fit()
    except KeyboardInterrupt:
        assert die_after is not None
    return found


def resumed(make: Callable[[], Any], folder: Path, die_after: int, **options: Any) -> list[list[float]]:
    """What a run reads that is killed after a step and started again; of either life what counts."""
    before = seen(make, folder, die_after, **options)
    return before.batches + seen(make, folder, **options).batches
