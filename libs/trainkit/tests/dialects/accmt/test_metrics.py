"""Metrics: what they are given, what their results do, what is refused."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainkit.callbacks.weights import load_weights
from trainkit.dialects.accmt.evaluator import Evaluator
from trainkit.dialects.accmt.metrics import Metric, MetricParallel

from libs.trainkit.tests.dialects.accmt.bowl import Bowl, Rows, bowls, fitted, hps, logged, trainer

# The module returns the values of a metric that some runs here do not have.
pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")


def defaults(kind: type) -> list[tuple[str, Any]]:
    return [(each.name, each.default) for each in inspect.signature(kind).parameters.values()]


@pytest.mark.spec("AC-101")
@pytest.mark.spec("AC-105")
def test_metrics_have_the_documented_parameters(tmp_path: Path) -> None:
    expected = [
        ("name", inspect.Parameter.empty),
        ("greater_is_better", True),
        ("main_metric", None),
        ("do_checks", True),
        ("cast", torch.float32),
    ]
    assert defaults(Metric) == defaults(MetricParallel) == expected
    assert Metric("f1").main_metric == "f1" and Metric("f1", main_metric="best").main_metric == "best"
    with pytest.raises(ValueError, match="two metrics of dataset '0' have the same name"):
        fitted(tmp_path, metrics=[Rows(), Rows()])
    assert not tmp_path.joinpath("metrics.jsonl").exists()


@pytest.mark.spec("AC-101")
def test_a_metric_gets_what_the_step_returned_under_its_name(tmp_path: Path) -> None:
    class Two(Bowl):
        def validation_step(self, key: str, batch: Any) -> Any:
            return {"loss": batch[0].mean(), "once": (batch[0],), "twice": (batch[0] * 2,)}

    class Sum(Metric):
        def compute(self, values: Tensor) -> dict[str, float]:
            return {self.name: values.sum().item()}

    made, _ = fitted(tmp_path, hps(max_steps=12), module=Two(), metrics=[Sum("twice"), Sum("once")])
    assert made.state.additional_metrics == {"0": {"valid_loss": 1.0, "once": 32.0, "twice": 64.0}}


@pytest.mark.spec("AC-102")
def test_the_main_entry_decides_and_every_entry_is_logged(tmp_path: Path) -> None:
    class Two(Metric):
        def compute(self, predicted: Tensor, wanted: Tensor) -> dict[str, float]:
            done = len(seen)
            seen.append(len(predicted))
            return {"accuracy": [0.85, 0.95, 0.75, 0.65][done], "f1": [math.nan, 0.89, 0.8, 0.95][done]}

    seen: list[int] = []
    for better, best in ((True, 4), (False, 3)):
        seen.clear()
        metric = Two("accuracy", greater_is_better=better, main_metric="f1")
        made = trainer(tmp_path / str(better), hps(epochs=4), metrics=metric, enable_checkpointing=False)
        made.register_model_saving("accuracy")
        made.fit(Bowl(), bowls(8), bowls(8))
        assert made.state.model_savings["best_accuracy"] == (0.95 if better else 0.8)
        # The weight is 2 - 2 * 0.8^n at step n.
        saved = float(load_weights(tmp_path / str(better) / "best_accuracy")["w"])
        assert saved == pytest.approx(2 - 2 * 0.8**best, abs=1e-6)
        assert logged(tmp_path / str(better), "accuracy") == {1: 0.85, 2: 0.95, 3: 0.75, 4: 0.65}
        f1 = logged(tmp_path / str(better), "f1")
        assert math.isnan(float(f1.pop(1))) and f1 == {2: 0.89, 3: 0.8, 4: 0.95}
        loss = made.results["0/loss"]
        assert made.state.additional_metrics == {"0": {"valid_loss": loss, "accuracy": 0.65, "f1": 0.95}}


@pytest.mark.spec("AC-102")
def test_results_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    class Wrong(Metric):
        answer: Any

        def compute(self, predicted: Tensor, wanted: Tensor) -> Any:
            return self.answer

    cases: list[tuple[Any, type[Exception], str]] = [
        ({"accuracy": 1.0, "other": 2.0}, KeyError, "returned no 'f1'; it has accuracy, other"),
        ({"f1": "high"}, TypeError, "has to return numbers by name"),
        ({"f1": torch.ones(2)}, TypeError, "has to return numbers by name"),
    ]
    for answer, kind, problem in cases:
        metric = Wrong("accuracy", main_metric="f1")
        metric.answer = answer
        with pytest.raises(Exception, match=problem) as refused:
            fitted(tmp_path, hps(max_steps=12), metrics=metric)
        assert refused.type is kind


@pytest.mark.spec("AC-077")
@pytest.mark.spec("AC-102")
def test_a_metric_gets_the_rows_of_all_batches_in_the_form_of_the_step(tmp_path: Path) -> None:
    class Forms(Bowl):
        def validation_step(self, key: str, batch: Any) -> Any:
            rows = batch[0]
            return {"loss": rows.mean(), "all": (rows, {"twice": rows * 2, "pair": [rows + 1, rows + 2]}, rows.long())}

    class Given(Metric):
        def compute(self, *values: Any) -> dict[str, float]:
            self.given = values
            return {"all": 1.0}

    metric, rows = Given("all"), torch.arange(20.0)
    val = torch.utils.data.TensorDataset(rows)
    fitted(tmp_path / "forms", hps(max_steps=12), module=Forms(), val=val, metrics=metric)
    assert len(metric.given) == 3
    first, parts, third = metric.given
    assert torch.equal(first, rows) and torch.equal(third, rows.long())
    assert torch.equal(parts["twice"], rows * 2)
    assert [each.tolist() for each in parts["pair"]] == [(rows + 1).tolist(), (rows + 2).tolist()]

    class Bare(Bowl):
        answer: Any = None

        def validation_step(self, key: str, batch: Any) -> Any:
            return self.answer or batch[0].mean()

    fitted(tmp_path / "bare", hps(max_steps=12), module=Bare(), val=val)
    assert logged(tmp_path / "bare", "val_loss") == {12: 9.5}
    module = Bare()
    module.answer = {"accuracy": (rows,)}
    with pytest.raises(Exception, match="returned no 'loss' on dataset '0'; it has accuracy") as refused:
        fitted(tmp_path / "none", hps(max_steps=12), module=module, val=val)
    assert refused.type is KeyError


@pytest.mark.spec("AC-103")
def test_shapes_are_compared_as_batches_come(tmp_path: Path) -> None:
    class Shapes(Bowl):
        wider = 0

        def validation_step(self, key: str, batch: Any) -> Any:
            wide = 2 + (self.state.val_step == 2) * self.wider
            return {"loss": batch[0].mean(), "accuracy": (batch[0][:, None].expand(-1, wide), batch[1])}

    for kind in (Rows, Parallel):
        module = Shapes()
        fitted(tmp_path / "same", hps(max_steps=12), module=module, metrics=kind(), resume=False)
        module.wider = 1
        problem = r"metric 'accuracy' on dataset '0': .*batch 2: shapes \[\(8, 3\), \(8,\)\] do not go with \[\(8, 2\)"
        with pytest.raises(Exception, match=problem) as refused:
            fitted(tmp_path / "other", hps(max_steps=12), module=module, metrics=kind(), resume=False)
        assert isinstance(refused.value, ValueError)


class Parallel(MetricParallel):
    def __init__(self, name: str = "accuracy", **options: Any) -> None:
        super().__init__(name, **options)
        self.types: list[torch.dtype] = []

    def compute(self, predicted: Tensor, wanted: Tensor) -> dict[str, float]:
        self.types = [predicted.dtype, wanted.dtype]
        self.rows = [len(predicted), len(wanted)]
        return {"accuracy": 1.0}


@pytest.mark.spec("AC-103")
@pytest.mark.spec("AC-104")
def test_metrics_per_process_check_and_cast_too(tmp_path: Path) -> None:
    class Uneven(Bowl):
        def validation_step(self, key: str, batch: Any) -> Any:
            return {"loss": batch[0].mean(), "accuracy": (batch[0].bfloat16(), batch[1][:-1].long())}

    with pytest.raises(ValueError, match=r"accuracy.*batch 0"):
        fitted(tmp_path / "checked", hps(max_steps=12), module=Uneven(), metrics=Parallel())
    cases: list[tuple[dict[str, Any], torch.dtype]] = [({}, torch.float32), ({"cast": None}, torch.bfloat16)]
    for at, (options, found) in enumerate(cases):
        metric = Parallel(do_checks=False, **options)
        fitted(tmp_path / str(at), hps(max_steps=12), module=Uneven(), metrics=metric)
        assert metric.types == [found, torch.int64] and metric.rows == [32, 28]


def test_a_metric_leaves_out_a_batch_for_which_the_step_returned_none(tmp_path: Path) -> None:
    class Some(Bowl):
        without = 0

        def validation_step(self, key: str, batch: Any) -> Any:
            found = super().validation_step(key, batch)
            return {**found, "accuracy": (None, None)} if self.state.val_step == self.without else found

    for without in (0, 1, 3):
        module, metric = Some(), Rows()
        module.without = without
        fitted(tmp_path / str(without), hps(max_steps=12), module=module, metrics=metric)
        assert metric.rows == [24]


def test_an_evaluator_leaves_out_a_batch_for_which_the_step_returned_none() -> None:
    class Short(Bowl):
        def validation_step(self, key: str, batch: Any) -> Any:
            full = len(batch[0]) == 8
            return {"loss": batch[0].mean(), "accuracy": (batch[0], batch[1]) if full else None}

    metric = Rows()
    Evaluator(metric, batch_size=8, num_workers=0).evaluate(Short(), bowls(20), "validation_step", None)
    assert metric.rows == [16]
