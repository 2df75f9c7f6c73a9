"""One evaluation outside of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainkit.dialects.accmt.evaluator import Evaluator

from libs.trainkit.tests.dialects.accmt.bowl import Bowl, Numbers, Rows

LIGHT: dict[str, Any] = {"num_workers": 0, "batch_size": 20}


class Probed(Bowl):
    """Its loss is the mean index of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Dropout()
        self.modes: list[Any] = []

    def test_step(self, batch: Any) -> Any:
        self.modes.append((self.model.training, self.teacher.training, torch.is_grad_enabled()))
        return {"loss": batch[2].float().mean(), "accuracy": (self(batch[0]), batch[1])}

    def loss_step(self, batch: Any) -> Any:
        return batch[2].float().mean()


@pytest.mark.spec("AC-X16")
def test_an_evaluation_counts_every_row_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, metric = Probed(), Rows()
    results = Evaluator(metric, **LIGHT).evaluate(module, Numbers(), results_output=tmp_path / "r.json")
    assert results == {"loss": pytest.approx(47.5), "accuracy": 0.5, "other": 0.25} and metric.rows == [96]
    assert json.loads((tmp_path / "r.json").read_text()) == results
    assert module.modes == [(False, False, False)] * 5 and module.model.training and module.teacher.training
    assert "Results on 96 samples:\n  loss: 47.5\n" in capsys.readouterr().out


@pytest.mark.spec("AC-X16")
def test_the_method_that_is_called_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    evaluator, module = Evaluator(**LIGHT), Probed()
    assert evaluator.evaluate(module, Numbers(), "loss_step", None) == {"loss": pytest.approx(47.5)}
    assert not list(tmp_path.iterdir())
    assert evaluator.evaluate_on_test(module, Numbers())["loss"] == pytest.approx(47.5)
    assert (tmp_path / "results.json").is_file()
    assert evaluator.evaluate_on_validation(module, Numbers(), None) == {"loss": pytest.approx(4.0)}
    assert module.keys == ["0"] * 5
    halves = Evaluator(collate_fn=lambda rows: tuple(map(torch.stack, zip(*[row[:2] for row in rows], strict=True))))
    assert Evaluator(num_workers=0).batch_size == halves.batch_size == 1
    halves.num_workers, halves.batch_size = 0, 50
    assert halves.evaluate_on_validation(module, Numbers(), None)["loss"] == pytest.approx(4.0)
    with pytest.raises(ValueError, match="Probed has no method 'other'"):
        evaluator.evaluate(module, Numbers(), "other")
    with pytest.raises(KeyError, match=r"test_step returned nothing for the metric 'missing'"):
        Evaluator(Rows("missing"), **LIGHT).evaluate(module, Numbers(), results_output=None)
    monkeypatch.setenv("TRAINKIT_STRATEGY", "fsdp")
    with pytest.raises(ValueError, match="does not support fsdp"):
        evaluator.evaluate(module, Numbers())


def on_two_processes(folder: str) -> None:
    metric = Rows()
    options: dict[str, Any] = {"num_workers": 0, "batch_size": 10}
    results = Evaluator([metric], **options).evaluate(Probed(), Numbers(), results_output=f"{folder}/results.json")
    rank = torch.distributed.get_rank()
    (Path(folder) / f"found-{rank}.json").write_text(json.dumps([results, metric.rows]))


@pytest.mark.spec("AC-X16")
def test_two_processes_divide_the_rows(forks: Any, tmp_path: Path) -> None:
    forks.succeed(on_two_processes, tmp_path, processes=2)
    first, second = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2))
    assert first[0] == second[0] == json.loads((tmp_path / "results.json").read_text())
    assert first[0]["loss"] == pytest.approx(47.5) and (first[1], second[1]) == ([96], [])
