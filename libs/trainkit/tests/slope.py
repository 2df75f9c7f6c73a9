"""A module of one weight, whose training has a closed form, and a trainer of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainkit import Trainer
from trainkit.data import Loader
from trainkit.trackers import RunContext, Tracker


class Slope(nn.Module):
    """One weight w at 0; every sample is x=1, y=2 and the loss (w-2)^2. After n updates, w = 2 - 2*0.8^n."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: list[Tensor]) -> Any:
        return ((self.w * batch[0] - 2) ** 2).mean()

    def evaluation_step(self, batch: list[Tensor]) -> dict[str, Any]:
        return {"loss": self.training_step(batch), "rows": batch[0]}


class Written(Tracker):
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.far: list[tuple[int, int | None]] = []
        self.outcome = ""

    def open(self, context: RunContext) -> None:
        self.context = context

    def log(self, values: Mapping[str, float | Tensor], step: int) -> None:
        self.rows.append((step, {name: float(value) for name, value in values.items()}))

    def progress(self, step: int, total_steps: int | None) -> None:
        self.far.append((step, total_steps))

    def close(self, outcome: str) -> None:
        self.outcome = outcome


def ones(samples: int) -> TensorDataset:
    return TensorDataset(torch.ones(samples))


def trainer(**options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "module": Slope(),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "train": Loader(ones(96), batch_size=8),
        "max_duration": "2ep",
        **options,
    }
    return Trainer(**settings)
