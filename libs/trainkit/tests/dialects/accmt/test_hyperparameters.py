"""Hyperparameters in code and in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainkit.dialects.accmt import HyperParameters, Optimizer, Scheduler
from trainkit.dialects.accmt.callbacks import Callback

from libs.trainkit.tests.dialects.accmt.bowl import (
    fitted,
    hps,
    trainer,
)

# The module returns the values of a metric that most runs here do not have.
pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")


@pytest.mark.spec("AC-002")
def test_hyperparameters_are_given_in_three_ways(tmp_path: Path) -> None:
    file = tmp_path / "hps.yaml"
    file.write_text("hps:\n  epochs: 2\n  batch_size: 8\n  optim: {type: SGD, lr: 1e-1}\n")
    mapping = {"epochs": 2, "batch_size": 8, "optimizer": "SGD", "optim_kwargs": {"lr": 0.1}}
    ways = [hps(), mapping, str(file)]
    ends = {fitted(tmp_path / str(at), way)[1].w for at, way in enumerate(ways)}
    assert len(ends) == 1 and ends.pop() == pytest.approx(2 - 2 * 0.8**24)
    with pytest.raises(FileNotFoundError, match=r"no\.yaml"):
        trainer(tmp_path / "none", str(tmp_path / "no.yaml"))
    file.write_text("")
    with pytest.raises(ValueError, match=r"hps\.yaml"):
        trainer(tmp_path / "empty", str(file))
    file.write_text("hps:\n  epochs: 2\n  epoch: 3\n")
    with pytest.raises(ValueError, match=r"hps\.yaml:3.*epoch"):
        trainer(tmp_path / "unknown", str(file))


@pytest.mark.spec("AC-111")
@pytest.mark.spec("X-01")
def test_both_forms_of_a_file_are_equal_and_unknown_keys_are_named_with_their_line(tmp_path: Path) -> None:
    nested, flat = tmp_path / "nested.yaml", tmp_path / "flat.yaml"
    nested.write_text(
        "hps:\n  epochs: 3\n  batch_size: [32, 64]\n  optim: {type: AdamW, lr: 1e-3}\n"
        "  scheduler: {type: LinearWithWarmup, num_warmup_steps: 13}\n"
    )
    flat.write_text(
        "epochs: 3\nbatch_size: [32, 64]\noptimizer: AdamW\noptim_kwargs: {lr: 1e-3}\n"
        "scheduler: LinearWithWarmup\nscheduler_kwargs: {num_warmup_steps: 13}\n"
    )
    one, other = HyperParameters.of(str(nested)), HyperParameters.of(str(flat))
    assert one == other and one.batch_size == (32, 64)
    made = one.make_optimizer()([("w", nn.Parameter(torch.zeros(1)))])
    assert made.param_groups[0]["lr"] == 0.001
    flat.write_text("epochs: 3\nepoch: 4\n")
    with pytest.raises(ValueError, match=r"flat.yaml:2.*epoch.*did you mean epochs"):
        HyperParameters.of(str(flat))


@pytest.mark.spec("AC-110")
def test_max_steps_end_a_run_within_an_epoch_and_wrong_numbers_are_refused(tmp_path: Path) -> None:
    made, module = fitted(tmp_path, hps(max_steps=30, batch_size=(8, 16)))
    assert (made.state.global_step, made.state.epoch, made.state.train_step) == (30, 2, 5)
    assert len(module.keys) == 2 * made.state.evaluations_done
    for wrong in ({"epochs": 0}, {"batch_size": (1, 2, 3)}, {"epochs": None}, {"optim_kwargs": {"learning": 1}}):
        with pytest.raises(ValueError):
            hps(**wrong)
    assert list(Optimizer) and list(Scheduler)


@pytest.mark.spec("AC-112")
@pytest.mark.spec("X-02")
def test_a_schedule_is_told_how_long_the_run_is(tmp_path: Path) -> None:
    numbers = {"scheduler": "LinearWithWarmup", "scheduler_kwargs": {"num_warmup_steps": 0}}
    rates: list[float] = []

    class Watch(Callback):
        def on_after_scheduler_step(self, scheduler: Any) -> None:
            rates.append(scheduler.get_last_lr()[0])

    fitted(tmp_path / "a", hps(**numbers), grad_accumulation_steps=4, callback=Watch())
    assert len(rates) == 6 and rates[2] == pytest.approx(0.05)
    rates.clear()
    fitted(tmp_path / "b", hps(**numbers, max_steps=30), grad_accumulation_steps=5, callback=Watch())
    assert len(rates) == 8 and rates[-2:] == pytest.approx([0.1 / 8, 0])
    with pytest.raises(ValueError, match="OneCycleLR"):
        fitted(tmp_path / "c", hps(scheduler="OneCycleLR", scheduler_kwargs={"max_lr": 0.1, "total_steps": 5}))
