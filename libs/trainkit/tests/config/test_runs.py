"""A run out of a file: its parts, and what it leaves behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainkit.config import CheckpointSettings, Component, ConfigError, RunConfig, load, parse
from trainkit.errors import InvalidSetup

TEXT = """\
name: line
max_duration: 4ep
batch_size: 8
optimizer: {type: SGD, lr: 0.1}
schedule: {type: LinearWithWarmup, num_warmup_steps: 0}
log_every: 1st
checkpoints: {folder: FOLDER, every: null}
callbacks:
  - {type: Monitor, every: 1st, memory: false, throughput: false}
  - {type: KeepBest, rule: val/loss}
  - {type: EMA, decay: 0.5}
  - {type: EarlyStopping, rule: val/loss, patience: 2}
trackers: [JsonLines, Csv]
"""


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any) -> Tensor:
        return ((self.w * batch[0] - 2) ** 2).mean()


def test_a_file_makes_a_run_that_leaves_its_settings_numbers_and_best_weights(tmp_path: Path) -> None:
    config = parse(TEXT.replace("FOLDER", str(tmp_path)), RunConfig)
    data = TensorDataset(torch.ones(24, 1))
    fit = config.trainer(module=Line(), train=data, evaluate=data, device="cpu").fit()
    assert fit.state.step == 12 and fit.trainer.name == "line"
    assert load(tmp_path / "config.yaml", RunConfig) == config
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "val/loss" in row] == [3, 6, 9, 12]
    rates = [row["lr"] for row in rows if "lr" in row]
    assert rates == pytest.approx([0.1 * (1 - step / 12) for step in range(1, 13)])
    assert (tmp_path / "metrics.csv").exists() and (tmp_path / "best" / "model.safetensors").exists()
    assert fit.trainer.parameters["optimizer"] == {"type": "SGD", "lr": 0.1}


def test_settings_in_code_are_those_of_a_file(tmp_path: Path) -> None:
    text = (
        f"{{max_duration: 2ep, batch_size: 8, optimizer: {{type: SGD, lr: 0.1}}, checkpoints: {{folder: {tmp_path}}}}}"
    )
    config = RunConfig(
        max_duration="2ep",
        batch_size=8,
        optimizer=Component("SGD", {"lr": 0.1}),
        checkpoints=CheckpointSettings(folder=str(tmp_path)),
    )
    assert config == parse(text, RunConfig)
    fit = config.trainer(module=Line(), train=TensorDataset(torch.ones(24, 1)), device="cpu").fit()
    assert fit.module.w.item() == pytest.approx(2 - 2 * 0.8**6)
    assert load(tmp_path / "config.yaml", RunConfig) == config


def test_evaluation_sets_by_name_get_loaders_and_own_parts_are_added(tmp_path: Path) -> None:
    config = parse("{max_duration: 1st, batch_size: 4, optimizer: SGD, checkpoints: null}", RunConfig)
    data = TensorDataset(torch.ones(24, 1))
    trainer = config.trainer(module=Line(), train=data, evaluate={"a": data, "b": data}, device="cpu")
    assert set(trainer.fit().results) == {"a/loss", "b/loss"}
    with pytest.raises(InvalidSetup, match="a trainer takes no 'metric'; did you mean metrics"):
        config.trainer(module=Line(), train=data, metric={})


def test_a_misspelled_part_is_told_with_its_line() -> None:
    with pytest.raises(
        ConfigError, match=r"run\.yaml:9: callbacks\[0\]\.evry: no argument of Monitor.*did you mean every"
    ):
        parse(TEXT.replace("every: 1st, mem", "evry: 1st, mem"), RunConfig, "run.yaml")
    with pytest.raises(
        ConfigError, match=r"run\.yaml:13: trackers\[1\]\.type: 'Cvs' is not a tracker.*did you mean Csv"
    ):
        parse(TEXT.replace("Csv", "Cvs"), RunConfig, "run.yaml")
