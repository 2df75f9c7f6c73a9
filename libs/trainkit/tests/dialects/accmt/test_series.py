"""What goes to trackers, and when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainkit.dialects.accmt import Monitor
from trainkit.dialects.accmt.series import Series
from trainkit.trackers import RunContext

from libs.trainkit.tests.dialects.accmt.bowl import (
    Bowl,
    Rows,
    fitted,
    hps,
    logged,
    trainer,
)
from libs.trainkit.tests.slope import Written

# The module returns the values of a metric that most runs here do not have.
pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")


@pytest.mark.spec("AC-044")
@pytest.mark.spec("AC-045")
def test_the_training_loss_is_logged_as_a_mean_at_its_cadence(tmp_path: Path) -> None:
    fitted(tmp_path / "epoch")
    losses = logged(tmp_path / "epoch", "train_loss")
    assert losses == {12: pytest.approx(0.921553, abs=1e-5), 24: pytest.approx(0.00435, abs=1e-5)}
    names = {"train_loss_metric_name": "tl", "val_loss_metric_name": "vl"}
    fitted(tmp_path / "steps", log_every=3, grad_accumulation_steps=2, **names)
    assert list(logged(tmp_path / "steps", "tl")) == [6, 12, 18, 24]
    assert list(logged(tmp_path / "steps", "vl")) == [12, 24] and (tmp_path / "steps" / "best_valid_loss").is_dir()
    assert logged(tmp_path / "steps", "train_loss") == logged(tmp_path / "steps", "val_loss") == {}
    fitted(tmp_path / "never", hps(epochs=1), log_every=None)
    assert logged(tmp_path / "never", "train_loss") == {}
    with pytest.raises(ValueError, match="are equal"):
        trainer(tmp_path, train_loss_metric_name="loss", val_loss_metric_name="loss")
    with pytest.raises(ValueError, match="log_every"):
        trainer(tmp_path, log_every=0)


@pytest.mark.spec("AC-048")
@pytest.mark.spec("AC-049")
@pytest.mark.spec("AC-051")
@pytest.mark.spec("AC-052")
@pytest.mark.spec("AC-055")
def test_the_monitor_switches_series(tmp_path: Path) -> None:
    fitted(tmp_path / "default", metrics=Rows())
    rows = [json.loads(line) for line in (tmp_path / "default" / "metrics.jsonl").read_text().splitlines()]
    series = {name for row in rows for name in row} - {"step", "time"}
    assert series == {"epoch", "train_loss", "val_loss", "accuracy", "other"}
    assert logged(tmp_path / "default", "epoch") == {12: 0, 24: 1}
    fitted(tmp_path / "other", monitor={"validation_loss": False, "checkpoint": True})
    assert logged(tmp_path / "other", "val_loss") == {} and (tmp_path / "other" / "best_valid_loss").is_dir()
    assert logged(tmp_path / "other", "checkpoint") == {12: 1, 24: 2}
    assert logged(tmp_path / "other", "epoch") == {12: 0, 24: 1}
    assert Monitor.of({"learning_rate": True}) == Monitor(learning_rate=True) and Monitor.of(None) == Monitor()
    off = {"epoch": False, "train_loss": False, "validation_loss": False, "additional_metrics": False}
    on = ("learning_rate", "grad_norm", "cpu_utilization", "checkpoint")
    for name, switches, expected in (("off", off, set()), ("on", {**off, **dict.fromkeys(on, True)}, {*on})):
        fitted(tmp_path / name, hps(epochs=1), metrics=Rows(), monitor=switches)
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert {series for row in rows for series in row} - {"step", "time"} == expected
    with pytest.raises(ValueError, match=r"learning_rat.*did you mean"):
        trainer(tmp_path, monitor={"learning_rat": True})


@pytest.mark.spec("AC-056")
def test_a_module_logs_when_the_trainer_does_and_past_it_through_its_tracker(tmp_path: Path) -> None:
    class Logging(Bowl):
        def training_step(self, batch: Any) -> Tensor:
            step = self.state.global_step + 1
            self.log({"own": torch.tensor(2.0 * step)}, step)
            self.tracker.log({"past": step}, step)
            return super().training_step(batch)

    fitted(tmp_path / "steps", hps(max_steps=6), module=Logging(), log_every=3)
    assert logged(tmp_path / "steps", "own") == {3: 6.0, 6: 12.0}
    assert logged(tmp_path / "steps", "past") == {step: step for step in range(1, 7)}
    Bowl().log({"own": 1.0}, 1)  # there is no tracker

    class Wrong(Bowl):
        def training_step(self, batch: Any) -> Tensor:
            self.log({"own": torch.zeros(2 if self.how == "mean" else 1)}, 1, self.how)
            return super().training_step(batch)

    for how, problem in (("max", "reduction"), ("mean", "scalars")):
        module: Any = Wrong()
        module.how = how
        with pytest.raises(ValueError, match=problem):
            fitted(tmp_path / how, hps(max_steps=1), module=module, log_every=1)


@pytest.mark.spec("AC-032")
@pytest.mark.spec("AC-050")
@pytest.mark.spec("AC-053")
def test_the_monitor_shows_rate_and_norm(tmp_path: Path) -> None:
    numbers = hps(scheduler="StepLR", scheduler_kwargs={"step_size": 1, "gamma": 0.5}, step_scheduler_per_epoch=True)
    monitor = Monitor(learning_rate=True, grad_norm=True)
    fitted(tmp_path / "a", numbers, monitor=monitor)
    assert logged(tmp_path / "a", "learning_rate") == {12: 0.1, 24: 0.05}
    for clip in (None, 1.0):
        fitted(tmp_path / f"{clip}", hps(max_steps=2), monitor=monitor, log_every=1, clip_grad=clip)
        assert logged(tmp_path / f"{clip}", "grad_norm").get(1) == 4.0

    class Groups(Bowl):
        def get_optimizer(self) -> Any:
            self.model.other = torch.nn.Parameter(torch.zeros(()))
            return torch.optim.SGD([{"params": [self.model.w]}, {"params": [self.model.other], "lr": 0.2}], lr=0.1)

    fitted(tmp_path / "groups", hps(epochs=1), module=Groups(), monitor=monitor)
    for at, rate in enumerate((0.1, 0.2)):
        assert logged(tmp_path / "groups", f"learning_rate_{at}") == {12: rate}


@pytest.mark.spec("AC-054")
@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_memory_is_logged_in_gigabytes(tmp_path: Path, device: str) -> None:
    class Holding(Bowl):
        def training_step(self, batch: Any) -> Tensor:
            if self.state.global_step == 1:
                self.held = torch.ones(2**28, device=device)  # 1 GiB
            return super().training_step(batch)

    module, series = Holding(), f"{'gpu' if device == 'cuda' else 'cpu'}_utilization"
    fitted(tmp_path, hps(max_steps=2), module=module, val=None, monitor={series: True}, log_every=1)
    held = logged(tmp_path, series)
    assert held[2] - held[1] == pytest.approx(1.07, abs=0.05)


@pytest.mark.spec("AC-054")
@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_a_gpu_there_is_no_such_series_and_one_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="there is no GPU") as told:
        fitted(tmp_path, hps(max_steps=2), val=None, monitor=Monitor(gpu_utilization=True), log_every=1)
    assert len(told) == 1 and logged(tmp_path, "gpu_utilization") == {}


def test_progress_reaches_the_trackers_under_the_renamed_series() -> None:
    tracker = Written()
    series = Series([tracker], Monitor(), train_loss="train_loss", val_loss="val_loss", sets=[])
    series.open(RunContext(name="bowl", folder=None))
    series.progress(3, 24)
    assert tracker.far == [(3, 24)]
