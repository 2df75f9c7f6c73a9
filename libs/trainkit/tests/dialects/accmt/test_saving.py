"""Rules for what is best, saved models, patience."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trainkit.dialects.accmt.callbacks import Callback

from libs.trainkit.tests.dialects.accmt.bowl import (
    Bowl,
    Rows,
    bowls,
    fitted,
    hps,
    logged,
    trainer,
)

# The module returns the values of a metric that most runs here do not have.
pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")


@pytest.mark.spec("AC-065")
def test_no_model_is_saved_when_that_is_switched_off(tmp_path: Path) -> None:
    made, _ = fitted(tmp_path, disable_model_saving=True)
    assert not (tmp_path / "best_valid_loss").exists()
    assert made.state.model_savings["best_valid_loss"] == pytest.approx(8.92e-5, abs=1e-6)


@pytest.mark.spec("AC-066")
@pytest.mark.spec("AC-067")
@pytest.mark.spec("AC-102")
def test_rules_save_when_their_groups_gain(tmp_path: Path) -> None:
    saved: dict[str, list[int]] = {}

    class Watch(Callback):
        def on_evaluation_end(self) -> None:
            assert self.state is not None
            for folder in tmp_path.glob("best_*"):
                step = json.loads((folder / "best.json").read_text())["step"]
                if step not in saved.setdefault(folder.name, []):
                    saved[folder.name].append(step)

    answers = [0.6, 0.8, 0.7, 0.6, 0.7, 0.9]
    made = trainer(tmp_path, hps(epochs=3), metrics=Rows(answers=answers, main_metric="f1"), callback=Watch())
    for rule in ("accuracy", "best_accuracy@a", "best_accuracy@a/accuracy@b"):
        made.register_model_saving(rule)
    with pytest.raises(ValueError, match="registered"):
        made.register_model_saving("best_accuracy")
    made.fit(Bowl(), bowls(96), {"a": bowls(32), "b": bowls(16)})
    assert saved["best_accuracy"] == [12, 36]
    assert saved["best_accuracy@a"] == [12, 24]
    assert saved["best_accuracy@a__accuracy@b"] == [12, 36]
    assert logged(tmp_path, "f1_a") == {12: 0.6, 24: 0.7, 36: 0.7} and 12 in logged(tmp_path, "other_a")
    wrong = trainer(tmp_path / "wrong")
    wrong.register_model_saving("acuracy")
    with pytest.raises(ValueError, match="acuracy"):
        wrong.fit(Bowl(), bowls(96), bowls(32))


@pytest.mark.spec("AC-068")
def test_a_bound_holds_savings_back(tmp_path: Path) -> None:
    made = trainer(tmp_path, hps(epochs=1))
    made.register_model_saving("best_valid_loss", saving_below=0.01)
    made.fit(Bowl(), bowls(96), bowls(32))
    assert not (tmp_path / "best_valid_loss").exists()
    made = trainer(tmp_path)
    made.register_model_saving("best_valid_loss", saving_below=0.01)
    made.fit(Bowl(), bowls(96), bowls(32))
    assert json.loads((tmp_path / "best_valid_loss" / "best.json").read_text())["values"] == [
        pytest.approx(8.92e-5, abs=1e-6)
    ]
    with pytest.raises(ValueError):
        made = trainer(tmp_path)
        made.register_model_saving("valid_loss", saving_below=0.1, saving_above=0.2)


@pytest.mark.spec("AC-072")
def test_patience_ends_a_run_after_chances_without_a_gain(tmp_path: Path) -> None:
    left: list[int] = []

    class Watch(Callback):
        def on_evaluation_end(self) -> None:
            assert self.state is not None
            left.append(self.state.patience_left["best_valid_loss"])

    class Scripted(Bowl):
        def validation_step(self, key: str, batch: Any) -> Any:
            return torch.tensor([1.0, 0.9, 0.95, 0.96, 0.5][self.state.evaluations_done])

    made, _ = fitted(tmp_path, hps(epochs=9), module=Scripted(), patience={"best_val_loss": 2}, callback=Watch())
    assert left == [2, 2, 1, 0] and made.state.evaluations_done == 4
    with pytest.raises(ValueError, match="best_f1"):
        fitted(tmp_path / "x", patience={"best_f1": 2})
