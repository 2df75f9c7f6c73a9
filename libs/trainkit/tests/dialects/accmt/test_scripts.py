"""Scripts without a change."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# The module returns the values of a metric that most runs here do not have.
pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")


SCRIPT = """
import sys, torch
from torch import nn
from accmt import AcceleratorModule, Trainer
from accmt.metrics import Metric
from accmt.monitor import Monitor
import accmt.callbacks

class Near(Metric):
    def compute(self, predicted, wanted):
        return {"near": ((predicted - wanted).abs() < 0.5).float().mean().item()}

class Line(AcceleratorModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Linear(1, 1)
    def training_step(self, batch):
        return ((self(batch[0]) - batch[1]) ** 2).mean()
    def validation_step(self, key, batch):
        predicted = self(batch[0])
        return {"loss": ((predicted - batch[1]) ** 2).mean(), "near": (predicted, batch[1])}

torch.manual_seed(0)
x = torch.randn(96, 1)
data = torch.utils.data.TensorDataset(x, 3 * x + 1)
trainer = Trainer("hps.yaml", sys.argv[1], metrics=Near("near"), monitor=Monitor(learning_rate=True),
                  dataloader_num_workers=0)
trainer.register_model_saving("best_near", saving_above=0.1)
trainer.fit(Line(), data, data)
print("steps", trainer.state.global_step, "near", trainer.state.additional_metrics["0"]["near"])
"""


def test_a_script_runs_without_a_change(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hps.yaml").write_text("hps:\n  epochs: 4\n  batch_size: 16\n  optim: {type: AdamW, lr: 1e-1}\n")
    command = [sys.executable, "-m", "trainkit.dialects", "run", "train.py", "runs/line"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "steps 24 near" in done.stdout
    assert (tmp_path / "runs" / "line" / "best_near" / "model.safetensors").is_file()
