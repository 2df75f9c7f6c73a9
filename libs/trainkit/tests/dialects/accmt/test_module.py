"""The user's module, and the state that it reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainkit.callbacks.weights import load_weights
from trainkit.dialects.accmt import AcceleratorModule
from trainkit.dialects.accmt.padding import pad

from libs.trainkit.tests.dialects.accmt.bowl import (
    Bowl,
    bowls,
    fitted,
    trainer,
)

# The module returns the values of a metric that most runs here do not have.
pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")


@pytest.mark.spec("AC-073")
@pytest.mark.spec("AC-078")
@pytest.mark.spec("AC-079")
def test_only_what_is_not_frozen_in_the_model_is_trained(tmp_path: Path) -> None:
    class Counted(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            Counted.steps += 1
            return super().step(closure)

    class Taught(Bowl):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.model.fixed = nn.Linear(1, 1), nn.Linear(1, 1)
            self.freeze(self.model.fixed)

        def get_optimizer(self) -> Any:
            return Counted([("w", self.model.w)], lr=0.1)

    module = Taught()
    before = [each.clone() for part in (module.teacher, module.model.fixed) for each in part.parameters()]
    fitted(tmp_path, module=module)
    after = [each for part in (module.teacher, module.model.fixed) for each in part.parameters()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert Counted.steps == 24 and module.w == pytest.approx(1.990555, abs=1e-5)
    assert set(load_weights(tmp_path / "best_valid_loss")) == {"w", "fixed.weight", "fixed.bias"}
    module.unfreeze(module.model.fixed)
    assert all(each.requires_grad for each in module.model.fixed.parameters())
    with pytest.raises(ValueError, match="model"):
        trainer(tmp_path).fit(type("Empty", (AcceleratorModule,), {})(), bowls(8))


@pytest.mark.spec("AC-074")
@pytest.mark.spec("AC-075")
@pytest.mark.spec("AC-076")
def test_a_module_calls_its_model_and_counts_its_parameters(tmp_path: Path) -> None:
    module = AcceleratorModule()
    module.model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    assert torch.equal(module(x), module.model(x)) and len(module) == 8
    module.model = nn.Identity()
    assert module
    with pytest.raises(ValueError, match="training_step"):
        trainer(tmp_path).fit(module, bowls(8))


@pytest.mark.spec("AC-081")
@pytest.mark.spec("AC-087")
def test_the_state_says_how_far_a_run_is(tmp_path: Path) -> None:
    made, module = fitted(tmp_path)
    assert [seen[1] for seen in module.seen] == [*range(12), *range(12)]
    assert module.seen[15] == (1, 3, 15, False)
    assert [seen[1] for seen in module.seen if seen[3]] == [11, 11]
    state = made.state
    assert (state.evaluations_done, state.num_checkpoints_made, state.is_last_epoch) == (2, 2, True)
    assert state.best_train_loss == pytest.approx(0.00435, abs=1e-5)
    assert json.loads(state.to_json())["best_valid_loss"] == pytest.approx(8.92e-5, abs=1e-6)


@pytest.mark.spec("AC-082")
def test_tensors_are_padded_to_one_length() -> None:
    rows = [torch.tensor([1, 2]), torch.tensor([3, 4, 5])]
    assert [each.tolist() for each in pad(rows, 0)] == [[1, 2, 0], [3, 4, 5]]
    assert [each.tolist() for each in pad(tuple(rows), 0, side="left")] == [[0, 1, 2], [3, 4, 5]]
    assert pad(rows, 0, op="stack").shape == (2, 3)
    assert [each.shape for each in pad([torch.ones(2, 2), torch.ones(2, 4)], 0)] == [(2, 4), (2, 4)]
    assert pad(rows[0], 0, max_length=4).tolist() == [1, 2, 0, 0]
    wrong: list[dict[str, Any]] = [
        {"tensor": rows[0], "padding": "longest"},
        {"tensor": rows[0]},
        {"tensor": rows[1], "max_length": 2},
        {"tensor": rows[0], "max_length": 4, "op": "stack"},
        {"tensor": rows, "side": "up"},
    ]
    for given in wrong:
        with pytest.raises(ValueError):
            pad(value=0, **given)
