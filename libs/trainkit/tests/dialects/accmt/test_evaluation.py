"""Evaluations and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainkit.dialects.accmt.metrics import Metric, MetricParallel

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


@pytest.mark.spec("AC-033")
def test_evaluation_is_without_dropout_and_without_gradients(tmp_path: Path) -> None:
    class Dropped(Bowl):
        def __init__(self) -> None:
            super().__init__()
            self.model.drop, self.losses = nn.Dropout(0.5), list[tuple[float, bool]]()

        def forward(self, x: Tensor) -> Tensor:
            return self.model.drop(self.model(x) + 1)

        def validation_step(self, key: str, batch: Any) -> Any:
            loss = ((self(batch[0]) - batch[1]) ** 2).mean()
            self.losses.append((float(loss.detach()), loss.requires_grad))
            return loss

        def training_step(self, batch: Any) -> Tensor:
            assert self.teacher is not None
            taught.append(self.teacher.training)
            return super().training_step(batch)

    taught, given = list[bool](), Dropped()
    given.teacher = nn.Dropout(0.5)
    _, module = fitted(tmp_path, hps(epochs=1, optim_kwargs={"lr": 0.0}), module=given, eval_when_start=True)
    assert taught == [False] * 12
    assert len(module.losses) == 8 and set(module.losses) == {(module.losses[0][0], False)}
    assert module.model.drop.training


@pytest.mark.spec("AC-034")
@pytest.mark.spec("AC-035")
@pytest.mark.spec("AC-036")
@pytest.mark.spec("AC-037")
def test_evaluations_come_when_they_are_due(tmp_path: Path) -> None:
    fitted(tmp_path / "epochs", eval_when_start=True)
    losses = logged(tmp_path / "epochs", "val_loss")
    assert losses == {0: 4.0, 12: pytest.approx(0.0188895, abs=1e-6), 24: pytest.approx(8.92e-5, abs=1e-6)}
    for every, last, steps in ((5, True, [5, 10, 15, 20, 24]), (5, False, [5, 10, 15, 20]), (6, True, [6, 12, 18, 24])):
        folder = tmp_path / f"{every}-{last}"
        options = {"evaluate_every_n_steps": every, "eval_when_finish": last, "enable_checkpointing": False}
        made, _ = fitted(folder, **options)
        assert list(logged(folder, "val_loss")) == steps and made.state.evaluations_done == len(steps)
    made, _ = fitted(tmp_path / "epochs", hps(epochs=3), eval_when_start=True)
    assert made.state.evaluations_done == 4  # a resumed run does not start again
    for last in (True, False):  # a run that ends within an epoch is evaluated as at the end of one
        fitted(tmp_path / f"part-{last}", hps(max_steps=15), enable_checkpointing=False, eval_when_finish=last)
        assert list(logged(tmp_path / f"part-{last}", "val_loss")) == [12, 15]
    options = {"evaluate_every_n_steps": 5, "enable_checkpointing": False}
    fitted(tmp_path / "accumulated", grad_accumulation_steps=2, **options)
    assert list(logged(tmp_path / "accumulated", "val_loss")) == [5, 10, 15, 20, 24]
    made, _ = fitted(tmp_path / "unevaluated", val=None, eval_when_start=True, **options)
    assert made.state.evaluations_done == 0

    class Given(Bowl):
        def validation_step(self, key: str, batch: Any) -> Any:
            return batch[0].mean()

    short = TensorDataset(torch.tensor([1.0] * 8 + [3.0] * 2))
    fitted(tmp_path / "short", hps(epochs=1), module=Given(), val=short, enable_checkpointing=False)
    assert logged(tmp_path / "short", "val_loss") == {12: pytest.approx(1.4)}
    with pytest.raises(ValueError, match="evaluate_every_n_steps"):
        trainer(tmp_path, evaluate_every_n_steps=0)


@pytest.mark.spec("AC-038")
@pytest.mark.spec("AC-077")
@pytest.mark.spec("AC-039")
def test_several_datasets_have_their_own_names_and_metrics(tmp_path: Path) -> None:
    one, two = Rows(), Rows("second")

    class Two(Bowl):
        def validation_step(self, key: str, batch: Any) -> Any:
            output = super().validation_step(key, batch)
            return {**output, "second": output["accuracy"]} if key == "b" else output

    class Three(Bowl):
        def validation_step(self, key: str, batch: Any) -> Any:
            output = super().validation_step(key, batch)
            return {**output, "second": output["accuracy"], "third": output["accuracy"]}

    sets = {"a": bowls(32), "b": bowls(16)}
    _, module = fitted(tmp_path / "d", module=Two(), val=sets, metrics={"a": one, "b": [one, two]})
    for name in ("val_loss_a", "val_loss_b", "accuracy_a", "accuracy_b", "second_b"):
        assert list(logged(tmp_path / "d", name)) == [12, 24]
    assert module.keys == (["a"] * 4 + ["b"] * 2) * 2
    assert two.rows == [16, 16]
    fitted(tmp_path / "l", hps(epochs=1), val=list(sets.values()), metrics=Rows())
    for name in ("val_loss_0", "val_loss_1", "accuracy_0", "accuracy_1"):
        assert list(logged(tmp_path / "l", name)) == [12]
    every = [Rows(), Rows("second")]
    with pytest.warns(UserWarning, match="returned 'third', and no metric has this name") as told:
        _, module = fitted(tmp_path / "one", module=Three(), metrics=every)
    assert module.keys == ["0"] * 8 and [metric.rows for metric in every] == [[32, 32]] * 2 and len(told) == 1
    assert all(list(logged(tmp_path / "one", name)) == [12, 24] for name in ("val_loss", "accuracy", "second"))
    empty: list[Any] = [[], {}]
    for wrong in (*empty, {1: bowls(8), "1": bowls(8)}):
        with pytest.raises(ValueError, match="val_dataset"):
            fitted(tmp_path / "wrong", val=wrong)
    with pytest.raises(KeyError, match=r"second.*'0'"):
        fitted(tmp_path / "x", metrics=[Rows(), Rows("second")])
    with pytest.raises(ValueError, match="'c'"):
        fitted(tmp_path / "y", val=sets, metrics={"c": Rows()})


@pytest.mark.spec("AC-103")
@pytest.mark.spec("AC-104")
def test_metrics_check_shapes_and_cast(tmp_path: Path) -> None:
    class Uneven(Bowl):
        def validation_step(self, key: str, batch: Any) -> Any:
            rows = batch[0].bfloat16()
            return {"loss": rows.mean(), "accuracy": (rows, batch[1][:-1])}

    class Types(Rows):
        def compute(self, predicted: Tensor, wanted: Tensor) -> dict[str, float]:
            self.given = (predicted.dtype, len(predicted), len(wanted))
            return {"accuracy": 1.0}

    with pytest.raises(ValueError, match=r"accuracy.*batch 0"):
        fitted(tmp_path / "checked", module=Uneven(), metrics=Rows())
    cases: list[tuple[dict[str, Any], torch.dtype]] = [
        ({}, torch.float32),
        ({"cast": None}, torch.bfloat16),
        ({"cast": "float16"}, torch.float16),
    ]
    for at, (options, found) in enumerate(cases):
        metric = Types(do_checks=False, **options)
        fitted(tmp_path / str(at), hps(max_steps=12), module=Uneven(), metrics=metric)
        assert metric.given == (found, 32, 28)
    for kind in (Metric, MetricParallel):
        for wrong in ("float23", "int64"):
            with pytest.raises(ValueError, match=f"cast='{wrong}' is no"):
                kind("accuracy", cast=wrong)
