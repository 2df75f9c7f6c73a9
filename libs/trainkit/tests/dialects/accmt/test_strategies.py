"""The same script on several strategies, chosen from outside."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainkit.callbacks.weights import load_weights
from trainkit.dialects.accmt.launching import VARIABLE, launch
from trainkit.strategies.ddp import DDP
from trainkit.strategies.deepspeed import DeepSpeed
from trainkit.strategies.fsdp import FSDP
from trainkit.strategies.single import Single

from libs.trainkit.tests.dialects.accmt.bowl import Bowl, apart, bowls, hps, trainer

# The module returns the values of a metric that the runs here do not have.
pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")


class Flat(Bowl):
    """The bowl with a weight that can be cut over processes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.given: set[torch.dtype] = set()

    def training_step(self, batch: Any) -> Tensor:
        assert batch[2].dtype == torch.int64
        return super().training_step(batch)

    def forward(self, x: Tensor) -> Tensor:
        self.given.add(x.dtype)
        return self.model(x[:, None])[:, 0]


class Banners(logging.Handler):
    """Counts what DeepSpeed tells of its preparations."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.levelno == logging.INFO


def on_two_processes(folder: str) -> None:
    import torch.distributed as dist

    banners = Banners()
    logging.getLogger("DeepSpeed").addHandler(banners)

    def fit(name: str, **options: Any) -> Flat:
        os.environ[VARIABLE] = name
        module, place = Flat(), Path(folder) / f"{name}-{len(options)}"
        settings = {"destroy_after_training": False, "enable_checkpointing": False, "shuffle_train": False, **options}
        trainer(place, hps(epochs=1), **settings).fit(module, apart(), bowls(32))
        if dist.get_rank() == 0:
            saved = float(load_weights(place / "best_valid_loss")["weight"])
            assert abs(saved - (2 - 2 * 0.8**6)) < (1e-5 if name[-4:] != "bf16" else 0.05), (name, saved)
        return module

    assert abs(float(fit("ddp").model.weight.detach()) - 1.475712) < 1e-5
    assert fit("ddp-bf16").given == {torch.float32}
    for name in ("fsdp", "deepspeed-1", "deepspeed-2", "deepspeed-3"):
        assert fit(name).given == {torch.float32}
    assert banners.count == 0 and logging.getLogger("DeepSpeed").isEnabledFor(logging.WARNING)
    assert fit("deepspeed-2-bf16").given == {torch.bfloat16}
    assert fit("deepspeed-2-bf16", prepare_batch=False, enable_prepare_logging=True).given == {torch.float32}
    assert banners.count > 0
    dist.destroy_process_group()
    raise SystemExit(0)  # there is no group left that could be closed after this


@pytest.mark.spec("AC-010")
@pytest.mark.spec("AC-021")
@pytest.mark.spec("AC-030")
def test_every_strategy_ends_where_the_formula_says(forks: Any, tmp_path: Path) -> None:
    forks.succeed(on_two_processes, tmp_path, processes=2)


@pytest.mark.spec("AC-030")
@pytest.mark.parametrize(
    ("name", "kind", "stage", "precision"),
    [
        ("auto", DDP, None, "fp32"),
        ("ddp-fp16", DDP, None, "fp16"),
        ("fsdp-bf16", FSDP, None, "bf16"),
        ("single", Single, None, "fp32"),
        *((f"deepspeed-{stage}-bf16", DeepSpeed, stage, "bf16") for stage in range(4)),
    ],
)
def test_a_name_says_strategy_stage_and_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: type, stage: int | None, precision: str
) -> None:
    monkeypatch.setenv(VARIABLE, name)
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = launch(trainer(tmp_path).settings, 2)
    assert (type(found.strategy), getattr(found.strategy, "stage", None), found.precision) == (kind, stage, precision)


def test_a_strategy_that_there_is_not_is_refused_with_those_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "deepspeed-5")
    with pytest.raises(ValueError, match="deepspeed-0 to deepspeed-3"):
        launch(trainer(tmp_path).settings, 1)
