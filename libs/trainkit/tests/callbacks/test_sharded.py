"""Callbacks where weights are sharded over processes: the same numbers as on one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset
from trainkit.callbacks import EMA, Callback, KeepBest, WatchGradients, load_weights
from trainkit.checkpoints import Checkpoints
from trainkit.data import Loader
from trainkit.trainer import Trainer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
        self.head = nn.Linear(16, 1)  # of the root, not of a unit that FSDP gathers by itself

    def training_step(self, batch: Any) -> Tensor:
        return ((self.head(self.layers(batch[0])) - 1) ** 2).mean()


class Kill(Callback):
    def on_step_end(self, fit: Any, loss: Tensor) -> None:
        if fit.state.step == 5:
            raise RuntimeError("the power went")


def train(folder: str, strategy: str, *more: Callback, checkpoints: Checkpoints | None = None) -> EMA:
    torch.manual_seed(0)
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    ema = EMA(0.9)
    Trainer(
        module=Net(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        train=Loader(TensorDataset(inputs), 8),
        evaluate=Loader(TensorDataset(inputs), 8, shuffle=False),
        max_duration="2ep",
        strategy=strategy,
        callbacks=[KeepBest("val/loss", Path(folder) / "best"), ema, WatchGradients(every=1), *more],
        checkpoints=checkpoints,
        device="cpu",
    ).fit()
    return ema


def keep(folder: str, strategy: str) -> None:
    ema = train(folder, strategy)
    sharded = any(isinstance(each, DTensor) for each in ema.averages.values())
    assert sharded == (strategy == "fsdp")


def resume(folder: str) -> None:
    policy = Checkpoints(folder=Path(folder) / "checkpoints", every="4st")
    with pytest.raises(RuntimeError, match="the power went"):
        train(folder, "fsdp", Kill(), checkpoints=policy)
    resumed, whole = train(folder, "fsdp", checkpoints=policy), train(folder + "/whole", "fsdp")
    for name, average in whole.averages.items():
        assert torch.equal(average.to_local(), resumed.averages[name].to_local()), name


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_averages_and_the_best_weights_are_those_of_one_process(strategy: str, forks: Any, tmp_path: Path) -> None:
    forks.succeed(keep, tmp_path / "several", processes=2, strategy=strategy)
    train(str(tmp_path / "one"), "single")
    one, several = (load_weights(tmp_path / name / "best") for name in ("one", "several"))
    assert list(one) == list(several)
    for name, weight in one.items():
        torch.testing.assert_close(several[name], weight, rtol=1e-5, atol=1e-6)


def test_sharded_averages_are_resumed_with_the_same_bits(forks: Any, tmp_path: Path) -> None:
    forks.succeed(resume, tmp_path, processes=2)
