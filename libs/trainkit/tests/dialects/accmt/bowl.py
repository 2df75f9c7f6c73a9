"""The bowl (w-2)^2: after n updates with rate 0.1, w = 2 - 2*0.8^n, and the loss of step k is 4*0.64^k."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from trainkit.dialects.accmt import AcceleratorModule, HyperParameters, Trainer
from trainkit.dialects.accmt.callbacks import Callback
from trainkit.dialects.accmt.metrics import Metric

ROWS_OF_HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


class Bowl(AcceleratorModule):
    def __init__(self) -> None:
        super().__init__()
        self.model: Any = Weight()
        self.seen: list[tuple[Any, ...]] = []
        self.keys: list[str] = []

    def training_step(self, batch: Any) -> Tensor:
        state = self.state
        self.seen.append((state.epoch, state.train_step, state.global_step, state.is_last_training_batch))
        return ((self(batch[0]) - batch[1]) ** 2).mean()

    def validation_step(self, key: str, batch: Any) -> Any:
        self.keys.append(key)
        predicted = self(batch[0])
        return {"loss": ((predicted - batch[1]) ** 2).mean(), "accuracy": (predicted, batch[1])}

    @property
    def w(self) -> float:
        return float(self.model.w.detach())


class Rows(Metric):
    """Notes how many rows it was given, and answers from a list."""

    def __init__(self, name: str = "accuracy", answers: Any = (), **options: Any) -> None:
        super().__init__(name, **options)
        self.rows: list[int] = []
        self.answers = list(answers)

    def compute(self, predicted: Tensor, wanted: Tensor) -> dict[str, float]:
        self.rows.append(len(predicted))
        return {self.main_metric: self.answers.pop(0) if self.answers else 0.5, "other": 0.25}


class Noted(Callback):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.given: dict[str, list[Any]] = {}


def _note(hook: str) -> Any:
    def call(self: Noted, *given: Any) -> None:
        self.calls.append(hook)
        self.given.setdefault(hook, []).append(
            given[0].detach().clone() if given and hook == "on_before_backward" else given
        )

    return call


for _hook in ROWS_OF_HOOKS:
    setattr(Noted, _hook, _note(_hook))


def bowls(samples: int) -> TensorDataset:
    return TensorDataset(torch.ones(samples), torch.full((samples,), 2.0))


def apart() -> TensorDataset:
    """The bowl for two processes and batches of 8, of which one gets targets of 1 and the other targets of 3: averaged
    gradients are those of the bowl, and either process alone ends elsewhere. The third part is whole numbers."""
    return TensorDataset(torch.ones(96), torch.where(torch.arange(96) % 16 < 8, 1.0, 3.0), torch.arange(96))


def hps(**changes: Any) -> HyperParameters:
    return HyperParameters(**{"epochs": 2, "batch_size": 8, "optim_kwargs": {"lr": 0.1}, **changes})


def trainer(folder: Path, numbers: Any = None, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"clip_grad": None, "dataloader_num_workers": 0, **options}
    return Trainer(numbers or hps(), folder, **settings)


def fitted(folder: Path, numbers: Any = None, *, module: Any = None, train: Any = None, val: Any = ..., **options: Any):
    made, module = trainer(folder, numbers, **options), module or Bowl()
    made.fit(module, train or bowls(96), bowls(32) if val is ... else val)
    return made, module


def logged(folder: Path, name: str) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[name] for row in rows if name in row}


class Numbers(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return torch.ones(()), torch.full((), 2.0), index


class Ordered(Bowl):
    def __init__(self) -> None:
        super().__init__()
        self.order: list[int] = []

    def training_step(self, batch: Any) -> Tensor:
        self.order += batch[2].tolist()
        return super().training_step(batch)


class Stop(Exception):
    pass


class StopsAt(Noted):
    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_before_training_step(self, batch: Any) -> None:
        assert self.state is not None
        if self.state.global_step == self.step:
            raise Stop


class Layers(Bowl):
    """The bowl with a sum of two weights, of which one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"early": Weight(), "late": Weight()})
        self.freeze(self.model["late"])

    def forward(self, x: Tensor) -> Tensor:
        return self.model["early"](x) + self.model["late"](x)

    @property
    def weights(self) -> list[float]:
        return [self.model["early"].w.item(), self.model["late"].w.item()]


class Swaps(Noted):
    """Trains the other weight too after the first epoch, and that alone after the second."""

    def on_epoch_end(self) -> None:
        module: Any = self.module
        if self.state.epoch == 0:
            module.unfreeze(module.model["late"])
        elif self.state.epoch == 1:
            module.freeze(module.model["early"])
