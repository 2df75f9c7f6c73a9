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
    assert logged(tmp_path / "epoch", "train_loss")[12] == pytest.approx(0.921553, abs=1e-5)
    fitted(tmp_path / "steps", log_every=3, grad_accumulation_steps=2, train_loss_metric_name="tl")
    assert list(logged(tmp_path / "steps", "tl")) == [6, 12, 18, 24]
    assert logged(tmp_path / "steps", "train_loss") == {}
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
    assert Monitor.of({"learning_rate": True}) == Monitor(learning_rate=True)
    with pytest.raises(ValueError, match=r"learning_rat.*did you mean"):
        trainer(tmp_path, monitor={"learning_rat": True})


@pytest.mark.spec("AC-050")
@pytest.mark.spec("AC-053")
def test_the_monitor_shows_rate_and_norm(tmp_path: Path) -> None:
    numbers = hps(scheduler="StepLR", scheduler_kwargs={"step_size": 1, "gamma": 0.5}, step_scheduler_per_epoch=True)
    monitor = Monitor(learning_rate=True, grad_norm=True)
    fitted(tmp_path / "a", numbers, monitor=monitor)
    assert logged(tmp_path / "a", "learning_rate") == {12: 0.1, 24: 0.05}
    fitted(tmp_path / "b", monitor=monitor, log_every=1)
    assert logged(tmp_path / "b", "grad_norm")[1] == 4.0


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
