"""The same script on several strategies, chosen from outside."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainkit.callbacks.weights import load_weights
from trainkit.dialects.accmt import Callback, Monitor
from trainkit.dialects.accmt.launching import VARIABLE, launch
from trainkit.strategies.ddp import DDP
from trainkit.strategies.deepspeed import DeepSpeed
from trainkit.strategies.fsdp import FSDP
from trainkit.strategies.single import Single

from libs.trainkit.tests.dialects.accmt.bowl import Bowl, Swaps, apart, bowls, hps, logged, trainer

# The module returns the values of a metric that the runs here do not have.
pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")


CLIPPED = 5.0
"""Less than the first norm of the two gradients together, and more than that of either."""
FIRST_NORM = (4.0**2 + 4.0**2) ** 0.5


class Flat(Bowl):
    """Two bowls with a weight each, which strategies divide over the two processes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(1, 2, bias=False)
        nn.init.zeros_(self.model.weight)
        self.given: set[torch.dtype] = set()

    def training_step(self, batch: Any) -> Tensor:
        assert batch[2].dtype == torch.int64
        return ((self(batch[0]) - batch[1][:, None]) ** 2).sum(1).mean()

    def validation_step(self, key: str, batch: Any) -> Tensor:
        return ((self(batch[0]) - batch[1][:, None]) ** 2).sum(1).mean()

    def forward(self, x: Tensor) -> Tensor:
        self.given.add(x.dtype)
        return self.model(x[:, None])


class FlatLayers(Flat):
    """The same with sums of two weights, of which one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"early": self.model, "late": copy.deepcopy(self.model)})
        self.freeze(self.model["late"])

    def forward(self, x: Tensor) -> Tensor:
        return self.model["early"](x[:, None]) + self.model["late"](x[:, None])


class Zeroing(Callback):
    """Writes weights before the fourth step, and sees at the end whether training continued from there."""

    steps = 0

    def on_before_training_step(self, batch: Any) -> None:
        assert self.module is not None
        if self.steps == 3:
            self.module.model.weight.data.zero_()
        self.steps += 1

    def on_fit_end(self) -> None:
        assert self.module is not None
        expected = 2 - 2 * 0.8 ** (self.steps - 3)
        assert self.module.model.weight.tolist() == [[pytest.approx(expected, abs=1e-5)]] * 2


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

    def fit(name: str, clip: float | None = None, **options: Any) -> Flat:
        os.environ[VARIABLE] = name
        module, place = Flat(), Path(folder) / f"{name}-{len(options)}"
        settings = {"destroy_after_training": False, "enable_checkpointing": False, "shuffle_train": False, **options}
        settings |= {"clip_grad": clip, "monitor": Monitor(grad_norm=True), "log_every": 1}
        trainer(place, hps(epochs=1), **settings).fit(module, apart(), bowls(32))
        dist.barrier()  # the first process has written everything
        first, exact = 0.4 if clip is None else 0.4 * clip / FIRST_NORM, name[-4:] != "bf16"
        saved, expected = load_weights(place / "best_valid_loss")["weight"], 2 - (2 - first) * 0.8**5
        assert saved.tolist() == [[pytest.approx(expected, abs=1e-5 if exact else 0.05)]] * 2, name
        assert logged(place, "grad_norm")[1] == pytest.approx(FIRST_NORM, rel=1e-5 if exact else 0.01), name
        return module

    assert fit("ddp").model.weight.tolist() == [[pytest.approx(1.475712, abs=1e-5)]] * 2
    assert fit("ddp-bf16").given == {torch.float32}
    for name in ("fsdp", "deepspeed-1", "deepspeed-2", "deepspeed-3"):
        assert fit(name, CLIPPED).given == {torch.float32}
    assert banners.count == 0 and logging.getLogger("DeepSpeed").isEnabledFor(logging.WARNING)
    assert fit("deepspeed-2-bf16").given == {torch.bfloat16}
    assert fit("deepspeed-2-bf16", prepare_batch=False, enable_prepare_logging=True).given == {torch.float32}
    assert banners.count > 0

    for name in ("deepspeed-1", "deepspeed-2"):
        os.environ[VARIABLE], zeroing = name, Zeroing()
        settings = {"callback": zeroing, "shuffle_train": False, "destroy_after_training": False}
        trainer(Path(folder) / f"zeroed-{name}", hps(epochs=1), **settings).fit(Flat(), apart(), bowls(32))
        assert zeroing.steps == 6

    os.environ[VARIABLE], place = "fsdp", Path(folder) / "swaps"
    made = trainer(place, callback=Swaps(), shuffle_train=False, destroy_after_training=False)
    made.fit(FlatLayers(), apart(), bowls(32))
    late = 0.8**6 * (1 - 0.6**6)  # as for `Layers` in test_processes
    for name, weight in load_weights(place / "best_valid_loss").items():
        expected = late if name.startswith("late") else 2 - 2 * 0.8**6 + late
        assert weight.tolist() == [[pytest.approx(expected, abs=1e-5)]] * 2
    dist.destroy_process_group()
    raise SystemExit(0)  # there is no group left that could be closed after this


@pytest.mark.spec("AC-010")
@pytest.mark.spec("AC-021")
@pytest.mark.spec("AC-025")
@pytest.mark.spec("AC-030")
@pytest.mark.spec("AC-053")
@pytest.mark.spec("AC-069")
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


@pytest.mark.spec("AC-012")
def test_steps_past_the_wrapper_are_a_matter_of_ddp_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "fsdp")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert type(launch(trainer(tmp_path, safe_mode=False).settings, 2).strategy) is FSDP
    assert told == []


def test_deepspeed_trains_what_it_began_with() -> None:
    with pytest.raises(ValueError, match="during the run, and strategy='deepspeed' trains those that it began with"):
        DeepSpeed(stage=2).trained_changed()


def test_a_strategy_that_there_is_not_is_refused_with_those_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "deepspeed-5")
    with pytest.raises(ValueError, match="deepspeed-0 to deepspeed-3"):
        launch(trainer(tmp_path).settings, 1)
