"""A run that has all that a restart could lose, and lives of it that are ended anywhere."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from trainkit import Callback, Checkpoints, Trainer
from trainkit.callbacks import EMA
from trainkit.checkpoints.tree import split
from trainkit.data import Loader
from trainkit.errors import Interrupted
from trainkit.loop.fit import Fit
from trainkit.loop.snapshots import take
from trainkit.module import Loss
from trainkit.sharded import whole
from trainkit.strategies import DDP
from trainkit.trackers import RunContext, Tracker
from trainkit.trainer import Totals

SAMPLES = 44  # no multiple of the batch: the last one of an epoch is smaller
PATIENCE_S = 240
INTERRUPTED = 75
"""The exit code of a life that SIGTERM ended."""


class Noisy(Dataset[tuple[Tensor, int]]):
    """Samples with noise from all three generators that augmentation uses."""

    def __init__(self, noise: float = 0.1) -> None:
        self._noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.rand(6) + random.random() + np.random.rand()
        return torch.full((6,), index / SAMPLES) + self._noise * noise.float(), index % 3


class Drifting(nn.Module):
    """Adds a running mean of what comes through, of which every process has another one within a window."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(24))

    def forward(self, values: Tensor) -> Tensor:
        if self.training:
            self.level.lerp_(values.detach().float().mean(0), 0.2)
        return values + self.level


class Net(nn.Module):
    """Dropout, running statistics, a weight that not every step uses: a restart must not lose their state."""

    def __init__(self, sums: bool = False, plain: bool = False) -> None:
        super().__init__()
        self._sums = sums
        between = [nn.ReLU()] if plain else [nn.BatchNorm1d(24), nn.ReLU(), Drifting(), nn.Dropout(0.3)]
        self.layers = nn.Sequential(nn.Linear(6, 24), *between, nn.Linear(24, 24))
        self.head = nn.Linear(24, 3)  # of the root, not of a unit that FSDP gathers by itself

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Any:
        inputs, labels = batch
        scores = self.head(self.layers(inputs))
        if self._sums:
            return Loss(F.cross_entropy(scores, labels, reduction="sum"), (labels + 1).sum())
        return F.cross_entropy(scores, labels)

    def evaluation_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """An evaluation draws random numbers too."""
        inputs, labels = batch
        return F.cross_entropy(self.head(self.layers(inputs + 0.1 * torch.rand_like(inputs))), labels)


class Ended(Callback):
    """Sends its process a signal after so many steps of this life: before a step, after its backward pass, in an
    evaluation, or soon after a save began."""

    def __init__(self, number: int, after: int, where: str, held: bool = False) -> None:
        self._number, self._left, self._where, self._held = number, after, where, held

    def _now(self, fit: Fit) -> None:
        self._where = ""
        os.kill(os.getpid(), self._number)
        agreement, deadline = fit._signals._agreement, time.monotonic() + PATIENCE_S
        while self._held and agreement is not None and not agreement.begun:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def on_step_start(self, fit: Fit, batch: Any) -> None:
        self._left -= 1
        if self._left <= 0 and self._where == "step":
            self._now(fit)

    def on_backward_end(self, fit: Fit) -> None:
        if self._left <= 0 and self._where == "backward":
            self._now(fit)

    def on_evaluation_step_start(self, fit: Fit, name: str, batch: Any) -> None:
        if self._left <= 0 and self._where == "evaluation":
            self._now(fit)

    def on_checkpoint_start(self, fit: Fit) -> None:
        if self._left <= 0 and self._where == "save":
            # While the thread writes, at whatever place it has reached by then.
            signal.signal(signal.SIGALRM, lambda *_: self._now(fit))
            signal.setitimer(signal.ITIMER_REAL, 0.002)

    def on_fit_end(self, fit: Fit) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


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


class Norms(Callback):
    """Logs at every step the norm of the last update's gradient."""

    def on_fit_start(self, fit: Fit) -> None:
        fit.need_grad_norm = True

    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        if fit.grad_norm is not None:
            fit.log({"norm": fit.grad_norm})


def train(folder: str, **options: Any) -> None:
    """One life of a run. It leaves `series` and, when it gets to the end, `end`: a digest of all that there is.

    Args:
        signal: what ends it, if anything does: a number, and for each process after how many steps and where.
        held: every process stays where the signal found it until all have got theirs.
        plain: nothing in it depends on how many processes there are; it leaves `weights`.
        sums: the module returns sums.
        also: callbacks.
        grace_s: the longest that the end of a life waits, in seconds.
    """
    place = Path(folder)
    torch.manual_seed(5)
    plain = options.pop("plain", False)
    data = Noisy(0.0 if plain else 0.1)
    workers, batch_size = options.pop("workers", 0), options.pop("batch_size", 8)
    if "bucket_mb" in options:
        options["strategy"] = DDP(bucket_mb=options.pop("bucket_mb"))
    callbacks: list[Callback] = [EMA(0.9), Norms(), *options.pop("also", ())]
    if ending := options.pop("signal", None):
        number, places = ending
        place_here = places[int(os.environ.get("RANK", "0"))]
        callbacks.append(Ended(number, *place_here, held=options.pop("held", False)))
    policy = Checkpoints(
        folder=place / "checkpoints", every="4st", keep_last=2, grace_s=options.pop("grace_s", Checkpoints.grace_s)
    )
    trainer = Trainer(
        module=Net(options.pop("sums", False), plain),
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        schedule=_cosine,
        train=Loader(data, batch_size=batch_size, num_workers=workers),
        evaluate={name: Loader(data, batch_size=8, shuffle=False) for name in ("one", "other")},
        callbacks=callbacks,
        trackers=[Lines(place / "series")],
        checkpoints=policy,
        seed=3,
        **{"max_duration": "24st", "log_every": "3st", **options},
    )
    try:
        fit = trainer.fit()
    except Interrupted as end:
        print(end)
        raise SystemExit(INTERRUPTED) from end
    if plain:
        weights = {name: whole(weight).tolist() for name, weight in fit.strategy.weights().items()}
        (place / "weights").write_text(json.dumps(weights))
    (place / f"end-{fit.strategy.rank}").write_text(json.dumps({"state": str(fit.state), **digests(fit)}))


def _cosine(optimizer: torch.optim.Optimizer, totals: Totals) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, totals.updates)


def digests(fit: Fit) -> dict[str, str]:
    snapshot, tensors = take(fit), dict[str, Tensor]()
    values = [split(snapshot.shared, "", tensors), split(snapshot.own, "own", tensors)]
    found = {name: _digest(tensor) for name, tensor in tensors.items()}
    return {**found, "values": json.dumps(values, default=str)}


def _digest(tensor: Tensor) -> str:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return hashlib.sha256(local.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def assert_same_end(one: Path, other: Path, processes: int) -> None:
    for rank in range(processes):
        ends = [json.loads((folder / f"end-{rank}").read_text()) for folder in (one, other)]
        different = [name for name in ends[0] if ends[0][name] != ends[1].get(name)]
        assert not different, [end[different[0]] for end in ends]
    assert (one / "series").read_text() == (other / "series").read_text()


def last_words(folder: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(folder.glob("rank-*.log")))
