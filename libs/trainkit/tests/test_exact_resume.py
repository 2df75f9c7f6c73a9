"""Killed anywhere and started again, a run ends with the bits of one that was never interrupted."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from trainkit import Callback, Checkpoints, Trainer
from trainkit.data import Loader
from trainkit.loop.fit import Fit
from trainkit.strategies import DDP
from trainkit.trackers import RunContext, Tracker
from trainkit.trainer import Totals

SAMPLES = 44  # no multiple of the batch: the last one of an epoch is smaller


class Noisy(Dataset[tuple[Tensor, int]]):
    """Samples with noise from all three generators that augmentation uses."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.rand(6) + random.random() + np.random.rand()
        return torch.full((6,), index / SAMPLES) + 0.1 * noise.float(), index % 3


class Net(nn.Module):
    """Dropout and running statistics: both have state that a restart must not lose."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 24), nn.Linear(24, 3)
        )

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.layers(inputs), labels)


class Averaged(Callback):
    """A moving average of the weights, as a callback with state."""

    def on_fit_start(self, fit: Fit) -> None:
        self._average = {name: p.detach().clone() for name, p in fit.module.named_parameters()}

    def on_update_end(self, fit: Fit) -> None:
        for name, p in fit.module.named_parameters():
            self._average[name].lerp_(p.detach(), 0.1)

    def state_dict(self) -> Mapping[str, Any]:
        return {"average": self._average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._average = dict(state["average"])


class Killer(Callback):
    """Dies by SIGKILL after so many steps of this life: between two, within one, or soon after a save began."""

    def __init__(self, after: int, where: str) -> None:
        self._left, self._where = after, where

    def on_step_start(self, fit: Fit, batch: Any) -> None:
        self._left -= 1
        if self._left == 0 and self._where == "step":
            os.kill(os.getpid(), signal.SIGKILL)

    def on_backward_end(self, fit: Fit) -> None:
        if self._left == 0 and self._where == "backward":
            os.kill(os.getpid(), signal.SIGKILL)

    def on_checkpoint_start(self, fit: Fit) -> None:
        if self._left <= 0:  # while the thread writes, at whatever place it has reached when this process dies
            signal.setitimer(signal.ITIMER_REAL, 0.002)
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))


class Lines(Tracker):
    """A series in a file, cut where the run goes on."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, context: RunContext) -> None:
        rows = [json.loads(line) for line in self._path.read_text().splitlines()] if self._path.exists() else []
        kept = [row for row in rows if row[0] <= (context.resumed_step or 0)]
        self._path.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self._file = self._path.open("a", buffering=1)

    def log(self, values: Mapping[str, float | Tensor], step: int) -> None:
        self._file.write(json.dumps([step, {name: float(value) for name, value in values.items()}]) + "\n")

    def close(self, outcome: str) -> None:
        self._file.close()


def train(folder: str, kill_after: int = 0, where: str = "step", **options: Any) -> None:
    """One life of a run. It leaves `series` and, when it gets to the end, `end`: a digest of all that there is."""
    place = Path(folder)
    torch.manual_seed(5)
    workers, batch_size = options.pop("workers", 0), options.pop("batch_size", 8)
    if "bucket_mb" in options:
        options["strategy"] = DDP(bucket_mb=options.pop("bucket_mb"))
    callbacks: list[Callback] = [Averaged()]
    if kill_after:
        callbacks.append(Killer(kill_after, where))
    fit = Trainer(
        module=Net(),
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        schedule=_cosine,
        train=Loader(Noisy(), batch_size=batch_size, num_workers=workers),
        evaluate=Loader(Noisy(), batch_size=16, shuffle=False),
        max_duration="24st",
        callbacks=callbacks,
        trackers=[Lines(place / "series")],
        log_every="3st",
        checkpoints=Checkpoints(folder=place / "checkpoints", every="4st", keep_last=2),
        seed=3,
        **options,
    ).fit()
    (place / f"end-{fit.strategy.rank}").write_text(json.dumps({"state": str(fit.state), **digests(fit)}))


def _cosine(optimizer: torch.optim.Optimizer, totals: Totals) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, totals.updates)


def digests(fit: Fit) -> dict[str, str]:
    from trainkit.checkpoints.tree import split
    from trainkit.loop.snapshots import take

    snapshot, tensors = take(fit), dict[str, Tensor]()
    values = [split(snapshot.shared, "", tensors), split(snapshot.own, "own", tensors)]
    found = {name: _digest(tensor) for name, tensor in tensors.items()}
    return {**found, "values": json.dumps(values, default=str)}


def _digest(tensor: Tensor) -> str:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return hashlib.sha256(local.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def killed_until_done(forks: Any, folder: Path, *, processes: int, seed: int, **options: Any) -> int:
    """Starts a run again and again, killing it at random places; returns how often it was killed."""
    chance, kills = random.Random(seed), 0
    while True:
        place = {"kill_after": chance.randrange(2, 12), "where": chance.choice(["step", "backward", "save"])}
        if kills == 3:
            place = {}
        codes = forks.run(train, folder, processes=processes, **place, **options)
        if not any(codes):
            return kills
        assert -signal.SIGKILL in codes, (codes, (folder / "rank-0.log").read_text()[-3000:])
        kills += 1


def assert_same_end(one: Path, other: Path, processes: int) -> None:
    for rank in range(processes):
        ends = [json.loads((folder / f"end-{rank}").read_text()) for folder in (one, other)]
        different = [name for name in ends[0] if ends[0][name] != ends[1].get(name)]
        assert not different
    assert (one / "series").read_text() == (other / "series").read_text()


EVERYTHING = {"accumulate": 3, "workers": 2, "precision": "fp16", "clip_norm": 1.0}


@pytest.mark.parametrize(
    ("processes", "options"),
    [
        pytest.param(1, {}, id="one process"),
        pytest.param(1, EVERYTHING, id="one process with workers, accumulation and loss scaling"),
        pytest.param(2, {**EVERYTHING, "strategy": "ddp"}, id="DDP"),
        pytest.param(4, {"bucket_mb": 0.0005, "batch_size": 16}, id="DDP on four processes with several buckets"),
        pytest.param(2, {"strategy": "fsdp", "accumulate": 3, "clip_norm": 1.0}, id="FSDP"),
    ],
)
def test_a_run_killed_at_random_places_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, forks: Any, processes: int, options: dict[str, Any]
) -> None:
    forks.succeed(train, tmp_path / "whole", processes=processes, **options)

    kills = killed_until_done(forks, tmp_path / "killed", processes=processes, seed=len(options), **options)

    assert kills
    assert_same_end(tmp_path / "whole", tmp_path / "killed", processes)
