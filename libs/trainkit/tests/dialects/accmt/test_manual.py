"""Modules that go backward and update by themselves."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainkit.dialects.accmt import ExtendedAcceleratorModule

from libs.trainkit.tests.dialects.accmt.bowl import Bowl, Noted, Weight, bowls, fitted, hps, logged, trainer

# The module returns the values of a metric that the runs here do not have.
pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")


class ByHand(ExtendedAcceleratorModule):
    """The bowl with its updates written out."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = Weight()
        self.gradients: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        return ((self(batch[0]) - batch[1]) ** 2).mean()

    def training_step(self, batch: Any) -> Tensor:
        loss = self.loss(batch)
        self.backward(loss)
        self.gradients.append(float(self.model.w.grad))
        self.step()
        self.zero_grad()
        return loss

    def validation_step(self, key: str, batch: Any) -> Tensor:
        return self.loss(batch)


@pytest.mark.spec("AC-083")
def test_steps_by_hand_end_where_the_trainer_s_end_and_hooks_fire_in_them(tmp_path: Path) -> None:
    automatic, noted = Noted(), Noted()
    _, plain = fitted(tmp_path / "plain", callback=automatic, module=Bowl())
    numbers = hps(scheduler="Constant")
    _, by_hand = fitted(tmp_path / "hand", numbers, module=ByHand(), callback=noted)
    assert float(by_hand.model.w.detach()) == plain.w == pytest.approx(1.990555, abs=1e-5)
    assert logged(tmp_path / "hand", "train_loss") == logged(tmp_path / "plain", "train_loss")
    for hook in ("on_before_backward", "on_after_optimizer_step", "on_after_zero_grad", "on_after_training_step"):
        assert noted.calls.count(hook) == automatic.calls.count(hook) == 24
    first = noted.calls[noted.calls.index("on_before_training_step") :]
    assert first[:10] == [
        "on_before_training_step",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_after_optimizer_step",
        "on_before_scheduler_step",
        "on_after_scheduler_step",
        "on_before_zero_grad",
        "on_after_zero_grad",
        "on_after_training_step",
    ]
    with pytest.warns(UserWarning, match="grad_accumulation_steps is ignored"):
        options: dict[str, Any] = {"grad_accumulation_steps": 4, "log_every": 1, "val": None}
        _, module = fitted(tmp_path / "ignored", hps(max_steps=2), module=ByHand(), **options)
    assert float(module.model.w.detach()) == pytest.approx(0.72)
    assert list(logged(tmp_path / "ignored", "train_loss")) == [1, 2]


@pytest.mark.spec("AC-084")
def test_gradients_of_two_losses_add(tmp_path: Path) -> None:
    class Two(ByHand):
        def training_step(self, batch: Any) -> Tensor:
            loss = self.loss(batch)
            self.backward(loss, retain_graph=True)
            self.gradients.append(float(self.model.w.grad))
            self.backward(loss, gradient=torch.tensor(3.0))
            self.gradients.append(float(self.model.w.grad))
            return loss

    _, module = fitted(tmp_path, hps(max_steps=1), module=Two(), val=None)
    assert module.gradients == [-4.0, -16.0]


# The order is what this test is about.
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@pytest.mark.spec("AC-085")
def test_a_step_is_the_optimizer_s_then_the_schedule_s(tmp_path: Path) -> None:
    noted = Noted()
    _, module = fitted(tmp_path / "plain", hps(max_steps=2), module=ByHand(), val=None, callback=noted)
    assert float(module.model.w.detach()) == pytest.approx(0.72)
    assert not [call for call in noted.calls if "scheduler" in call]

    class Parts(ByHand):
        def training_step(self, batch: Any) -> Tensor:
            loss = self.loss(batch)
            self.backward(loss)
            self.step_optimizer()
            self.step_scheduler()
            self.zero_grad()
            return loss

    numbers = hps(max_steps=2, scheduler="StepLR", scheduler_kwargs={"step_size": 1, "gamma": 0.5})
    noted = Noted()
    _, parts = fitted(tmp_path / "parts", numbers, module=Parts(), val=None, callback=noted)
    _, whole = fitted(tmp_path / "whole", numbers, module=ByHand(), val=None)
    assert torch.equal(parts.model.w, whole.model.w) and float(parts.model.w.detach()) == pytest.approx(0.56)
    steps = [call for call in noted.calls if call in ("on_after_optimizer_step", "on_after_scheduler_step")]
    assert steps == ["on_after_optimizer_step", "on_after_scheduler_step"] * 2
    _, clipped = fitted(tmp_path / "clipped", hps(max_steps=1), module=ByHand(), val=None, clip_grad=1.0)
    assert float(clipped.model.w.detach()) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="while a trainer fits it"):
        ByHand().step()


@pytest.mark.spec("AC-086")
def test_gradients_that_nobody_resets_add_up_and_one_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Never(ByHand):
        def training_step(self, batch: Any) -> Tensor:
            loss = self.loss(batch)
            self.backward(loss)
            self.gradients.append(float(self.model.w.grad))
            self.step()
            return loss

    with caplog.at_level(logging.WARNING, "trainkit"):
        fitted(tmp_path / "reset", hps(max_steps=3), module=ByHand(), val=None)
        assert not [record for record in caplog.records if "without zero_grad" in record.message]
        _, module = fitted(tmp_path / "never", hps(max_steps=3), module=Never(), val=None)
    assert module.gradients[:2] == pytest.approx([-4.0, -4.0 - 2 * (2 - 0.4)])
    assert sum("without zero_grad" in record.message for record in caplog.records) == 1


@pytest.mark.spec("AC-086")
def test_gradients_are_reset_to_none_unless_zeros_are_asked_for(tmp_path: Path) -> None:
    class Both(ByHand):
        def training_step(self, batch: Any) -> Tensor:
            loss = self.loss(batch)
            for options in ({}, {"set_to_none": False}):
                self.backward(loss, retain_graph=True)
                self.zero_grad(**options)
                self.gradients.append(self.model.w.grad)
            return loss

    _, module = fitted(tmp_path, hps(max_steps=1), module=Both(), val=None)
    assert module.gradients == [None, torch.zeros(())]


def test_a_run_that_was_cut_off_keeps_gradients_that_were_not_reset(tmp_path: Path) -> None:
    class Late(ByHand):
        def training_step(self, batch: Any) -> Tensor:
            loss = self.loss(batch)
            self.backward(loss)
            if self.state.global_step % 2:
                self.step()
                self.zero_grad()
            return loss

    options: dict[str, Any] = {"checkpoint_every": "3st", "val": None}
    _, whole = fitted(tmp_path / "whole", hps(max_steps=4), module=Late(), **options)
    fitted(tmp_path / "cut", hps(max_steps=3), module=Late(), **options)
    _, rest = fitted(tmp_path / "cut", hps(max_steps=4), module=Late(), **options)
    assert torch.equal(rest.model.w, whole.model.w)
    made = trainer(tmp_path / "x")
    made.fit(ByHand(), bowls(8), None)
    assert made.state.finished
