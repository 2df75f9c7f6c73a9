"""Hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from libs.trainkit.tests.dialects.accmt.bowl import (
    ROWS_OF_HOOKS,
    Bowl,
    Noted,
    bowls,
    fitted,
    hps,
)

# The module returns the values of a metric that most runs here do not have.
pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")


@pytest.mark.spec("AC-090")
@pytest.mark.spec("AC-091")
@pytest.mark.spec("AC-092")
@pytest.mark.spec("AC-093")
@pytest.mark.spec("AC-097")
@pytest.mark.spec("AC-098")
@pytest.mark.spec("AC-099")
def test_hooks_are_called_as_often_as_things_happen(tmp_path: Path) -> None:
    noted = Noted()
    made, module = fitted(tmp_path, callback=[noted])
    assert noted.module is module and noted.trainer is made and noted.state is made.state
    counts = {hook: noted.calls.count(hook) for hook in ROWS_OF_HOOKS}
    assert counts == {
        **dict.fromkeys(ROWS_OF_HOOKS, 0),
        **dict.fromkeys(("on_fit_start", "on_fit_end"), 1),
        **dict.fromkeys(("on_epoch_start", "on_epoch_end", "on_evaluation_start", "on_evaluation_end"), 2),
        **dict.fromkeys(("on_before_training_step", "on_after_training_step"), 24),
        **dict.fromkeys(("on_before_backward", "on_after_backward"), 24),
        **dict.fromkeys(("on_before_optimizer_step", "on_after_optimizer_step"), 24),
        **dict.fromkeys(("on_before_zero_grad", "on_after_zero_grad"), 24),
        **dict.fromkeys(("on_before_validation_step", "on_after_validation_step"), 8),
        "on_save_checkpoint": 2,
    }
    assert float(noted.given["on_before_backward"][0]) == 4.0
    noted = Noted()
    several = {"val": {"a": bowls(32), "b": bowls(16)}, "grad_accumulation_steps": 4, "enable_checkpointing": False}
    fitted(tmp_path / "sets", callback=noted, **several)
    assert noted.calls.count("on_evaluation_start") == noted.calls.count("on_evaluation_end") == 2
    assert noted.calls.count("on_before_validation_step") == 12
    assert float(noted.given["on_before_backward"][0]) == 4.0
    noted = Noted()
    fitted(tmp_path, hps(epochs=3), callback=noted)
    assert noted.calls.count("on_resume") == 1


@pytest.mark.spec("AC-094")
@pytest.mark.spec("AC-095")
@pytest.mark.spec("AC-096")
def test_hooks_around_an_update(tmp_path: Path) -> None:
    gradients: list[bool] = []

    class Watch(Noted):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            gradients.append(optimizer.param_groups[0]["params"][0].grad is not None)

        on_after_zero_grad = on_before_zero_grad

    scheduled = {"scheduler": "Constant"}
    cases = (
        (hps(), 4, 6, 0),
        (hps(**scheduled), 1, 24, 24),
        (hps(**scheduled, step_scheduler_per_epoch=True), 1, 24, 2),
    )
    for at, (numbers, accumulate, updates, schedules) in enumerate(cases):
        watch = Watch()
        gradients.clear()
        options = {"grad_accumulation_steps": accumulate, "enable_checkpointing": False}
        fitted(tmp_path / str(at), numbers, callback=watch, **options)
        for when in ("before", "after"):
            assert watch.calls.count(f"on_{when}_optimizer_step") == updates
            assert watch.calls.count(f"on_{when}_scheduler_step") == schedules
        assert gradients == [True, False] * updates


@pytest.mark.spec("AC-100")
@pytest.mark.parametrize(
    ("error", "hook"),
    [
        (RuntimeError("broken"), "on_runtime_error"),
        (torch.OutOfMemoryError("CUDA out of memory"), "on_cuda_out_of_memory"),
        (KeyboardInterrupt(), "on_keyboard_interrupt"),
        (ValueError("wrong"), "on_exception"),
    ],
)
def test_each_error_has_one_hook_and_goes_on(tmp_path: Path, error: BaseException, hook: str) -> None:
    class Raises(Bowl):
        def training_step(self, batch: Any) -> Tensor:
            raise error

    noted = Noted()
    with pytest.raises(type(error)):
        fitted(tmp_path, module=Raises(), callback=noted, safe_steps=False)
    assert [call for call in noted.calls if call in ROWS_OF_HOOKS[-4:]] == [hook]
    assert "on_fit_end" not in noted.calls
