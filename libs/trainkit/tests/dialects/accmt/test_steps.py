"""Steps and updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainkit.callbacks.weights import load_weights
from trainkit.dialects.accmt import Monitor, Trainer
from trainkit.dialects.accmt.callbacks import Callback

from libs.trainkit.tests.dialects.accmt.bowl import (
    Bowl,
    Noted,
    bowls,
    fitted,
    hps,
    logged,
    trainer,
)

# The module returns the values of a metric that most runs here do not have.
pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")


@pytest.mark.spec("AC-023")
def test_a_step_goes_backward_and_updates(tmp_path: Path) -> None:
    assert fitted(tmp_path / "1", hps(max_steps=1))[1].w == pytest.approx(0.4)
    assert fitted(tmp_path / "2", hps(max_steps=2))[1].w == pytest.approx(0.72)

    class Detached(Bowl):
        def training_step(self, batch: Any) -> Tensor:
            return super().training_step(batch).detach()

    with pytest.raises(TypeError, match="training_step"):
        fitted(tmp_path / "3", module=Detached())


@pytest.mark.spec("AC-024")
def test_accumulated_steps_make_one_update_and_leftover_ones_too(tmp_path: Path) -> None:
    for accumulate in (4, 5):
        noted = Noted()
        options: dict[str, Any] = {"grad_accumulation_steps": accumulate, "callback": noted}
        _, module = fitted(tmp_path / str(accumulate), hps(epochs=1), **options)
        assert module.w == pytest.approx(0.976, abs=1e-6)
        assert noted.calls.count("on_after_optimizer_step") == 3
    with pytest.raises(ValueError, match="grad_accumulation_steps"):
        trainer(tmp_path, grad_accumulation_steps=0)


@pytest.mark.spec("AC-025")
def test_gradients_are_clipped_at_one_unless_told_otherwise(tmp_path: Path) -> None:
    made = Trainer(hps(max_steps=1), tmp_path, dataloader_num_workers=0)
    module = Bowl()
    made.fit(module, bowls(96))
    assert module.w == pytest.approx(0.1)

    class Steep(Bowl):
        def training_step(self, batch: Any) -> Tensor:
            return (self.model.weight * torch.tensor([3.0, 4.0, 0.0, 0.0])).sum()

    class Watch(Callback):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            found.append(optimizer.param_groups[0]["params"][0].grad.flatten().tolist())

    found: list[list[float]] = []
    steep = Steep()
    steep.model = nn.Linear(4, 1, bias=False)
    options: dict[str, Any] = {"clip_grad": 1.0, "monitor": Monitor(grad_norm=True), "log_every": 1}
    fitted(tmp_path / "steep", hps(max_steps=1), module=steep, val=None, callback=Watch(), **options)
    assert found == [pytest.approx([0.6, 0.8, 0.0, 0.0])] and logged(tmp_path / "steep", "grad_norm") == {1: 5.0}


def test_gradient_checkpointing_is_asked_of_the_model(tmp_path: Path) -> None:
    asked: list[Any] = []
    module = Bowl()
    module.model.gradient_checkpointing_enable = lambda gradient_checkpointing_kwargs: asked.append(
        gradient_checkpointing_kwargs
    )
    fitted(tmp_path / "a", hps(max_steps=1), module=module, gradient_checkpointing=True)
    assert asked == [None]
    with pytest.raises(ValueError, match="gradient_checkpointing_enable"):
        fitted(tmp_path / "b", gradient_checkpointing=True)


@pytest.mark.spec("AC-011")
def test_compiling_changes_neither_the_result_nor_the_names_of_weights(tmp_path: Path) -> None:
    _, plain = fitted(tmp_path / "plain", hps(epochs=1))
    _, compiled = fitted(tmp_path / "compiled", hps(epochs=1), compile=True, compile_kwargs={"backend": "eager"})
    assert plain.w == compiled.w
    names = [set(load_weights(tmp_path / name / "best_valid_loss")) for name in ("plain", "compiled")]
    assert names[0] == names[1] == {"w"}
