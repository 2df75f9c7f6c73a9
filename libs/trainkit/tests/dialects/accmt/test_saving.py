"""Rules for what is best, saved models, patience."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from trainkit.callbacks.weights import load_weights
from trainkit.dialects.accmt.callbacks import Callback
from trainkit.dialects.accmt.saving import canonical, rule_of
from trainkit.errors import DamagedCheckpoint
from trainkit.metrics.rules import Record, Term

from libs.trainkit.tests.dialects.accmt.bowl import (
    Bowl,
    Rows,
    Stop,
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
    made = trainer(tmp_path, disable_model_saving=True, metrics=Rows())
    made.register_model_saving("accuracy")
    made.fit(Bowl(), bowls(96), bowls(32))
    assert not list(tmp_path.glob("best_*"))
    assert made.state.model_savings.get("best_valid_loss") == pytest.approx(8.92e-5, abs=1e-6)


@pytest.mark.spec("AC-067")
def test_a_rule_names_metrics_and_datasets() -> None:
    one, two = Rows(main_metric="f1"), Rows("error", greater_is_better=False)
    metrics = {"a": {"accuracy": one, "error": two}, "b": {"accuracy": one}, "c": {}}
    both, first = ("a/accuracy/f1", "b/accuracy/f1"), ("a/accuracy/f1",)
    expected: dict[str, list[Term]] = {
        "best_accuracy": [Term(both, "max")],
        "best_accuracy@a": [Term(first, "max")],
        "best_accuracy@a@b": [Term(both, "max")],
        "best_error": [Term(("a/error/error",), "min")],
        "best_accuracy@a/error@a": [Term(first, "max"), Term(("a/error/error",), "min")],
        "best_accuracy/error@a": [Term(both, "max"), Term(("a/error/error",), "min")],
        "best_valid_loss": [Term(("a/loss", "b/loss", "c/loss"), "min")],
        "best_valid_loss@b": [Term(("b/loss",), "min")],
        "best_train_loss": [Term(("train/loss",), "min")],
    }
    assert {name: list(rule_of(canonical(name), metrics).terms) for name in expected} == expected
    results = {"a/accuracy/f1": 0.6, "b/accuracy/f1": 0.8}
    assert Term(both, "max").value(results) == pytest.approx(0.7)
    record = Record(rule_of("best_accuracy@a/accuracy@b", metrics))
    better, worse = {**results, "b/accuracy/f1": 0.9}, {"a/accuracy/f1": 0.5, "b/accuracy/f1": 1.0}
    assert [record.gained(each, 1) for each in (results, better, better, worse)] == [True, True, False, False]


@pytest.mark.spec("AC-064")
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
    for same in ("best_accuracy", "accuracy"):
        with pytest.raises(ValueError, match="registered"):
            made.register_model_saving(same)
    made.fit(Bowl(), bowls(96), {"a": bowls(32), "b": bowls(16)})
    assert saved.get("best_valid_loss") == [12, 24, 36]
    with pytest.raises(ValueError, match="before fit"):
        made.register_model_saving("other")
    assert saved.get("best_accuracy") == [12, 36]
    assert saved.get("best_accuracy@a") == [12, 24]
    assert saved.get("best_accuracy@a__accuracy@b") == [12, 36]
    assert logged(tmp_path, "f1_a") == {12: 0.6, 24: 0.7, 36: 0.7} and 12 in logged(tmp_path, "other_a")
    wrong = trainer(tmp_path / "wrong")
    wrong.register_model_saving("acuracy")
    with pytest.raises(ValueError, match=r"'acuracy'; there are train_loss, valid_loss"):
        wrong.fit(Bowl(), bowls(96), bowls(32))
    wrong = trainer(tmp_path / "wrong", metrics=Rows())
    wrong.register_model_saving("accuracy@c")
    with pytest.raises(ValueError, match=r"no dataset 'c' has the metric 'accuracy'; these have it: 0"):
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
    for below, above in ((0.1, 0.2), (0.2, 0.2)):
        with pytest.raises(ValueError, match="no value is above"):
            trainer(tmp_path).register_model_saving("valid_loss", saving_below=below, saving_above=above)
    with pytest.raises(ValueError, match="several groups"):
        trainer(tmp_path).register_model_saving("accuracy@a/accuracy@b", saving_above=0.2)
    for bounds, values in (
        ({"saving_above": 0.5}, {0.5: False, 0.4: False, 0.6: True, 0.55: False, 0.9: True}),
        ({"saving_below": 0.5, "saving_above": 0.1}, {0.5: False, 0.7: False, 0.4: True, 0.1: False, 0.3: False}),
    ):
        made = trainer(tmp_path, metrics=Rows())
        made.register_model_saving("accuracy", **bounds)
        ((_, limits),) = made.rules.items()
        record = Record(rule_of("best_accuracy", {"0": {"accuracy": Rows()}}, *limits))
        assert {value: record.gained({"0/accuracy/accuracy": value}, 1) for value in values} == values


class Layers(Bowl):
    """The bowl with 8 more matrices of 4,096 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.model.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(8))


@pytest.mark.spec("AC-070")
def test_weights_are_divided_into_files_of_at_most_a_size(tmp_path: Path) -> None:
    for size, count in (("10GB", 1), ("9kB", 4), ("8500B", 4), ("5KB", 8)):
        place = tmp_path / size
        module = Layers()
        fitted(place, hps(epochs=1), module=module, max_shard_size=size, enable_checkpointing=False)
        files = list((place / "best_valid_loss").glob("*.safetensors"))
        assert len(files) == count and max(file.stat().st_size for file in files[1:] or files) < 40_000
        assert (place / "best_valid_loss" / "model.safetensors.index.json").exists() == (count > 1)
        weights = load_weights(place / "best_valid_loss")
        assert all(torch.equal(weights[name], each) for name, each in module.model.state_dict().items())
    for wrong in ("many", "0GB", "-1GB"):
        with pytest.raises(ValueError, match="max_shard_size"):
            trainer(tmp_path, max_shard_size=wrong)


@pytest.mark.spec("AC-071")
def test_tied_weights_of_a_saved_model_stay_tied(tmp_path: Path) -> None:
    class Tied(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.model.layers[7].weight = self.model.layers[0].weight

    for safe in (True, False):
        module, place = Tied(), tmp_path / str(safe)
        fitted(place, hps(epochs=1), module=module, safe_serialization=safe, enable_checkpointing=False)
        saved = place / "best_valid_loss"
        assert sorted(path.name for path in saved.iterdir()) == ["best.json", "model.safetensors"]
        weights, expected = load_weights(saved), module.model.state_dict()
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], each) for name, each in expected.items())
        with safe_open(saved / "model.safetensors", framework="pt") as file:
            assert len(file.keys()) == len(expected) - 1


@pytest.mark.spec("AC-069")
def test_a_run_that_dies_while_it_replaces_a_saved_model_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, saved = Path.rename, list[Path]()

    def dying(path: Path, target: Path) -> Path:
        if target.name == "best_valid_loss":
            saved.append(target)
            if len(saved) == 2:
                raise Stop
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", dying)
    with pytest.raises(Stop):
        fitted(tmp_path, enable_checkpointing=False)
    found = {}
    with contextlib.suppress(OSError, DamagedCheckpoint):
        found = load_weights(tmp_path / "best_valid_loss")
    assert {name: float(each) for name, each in found.items()} == {"w": pytest.approx(2 - 2 * 0.8**12)}


@pytest.mark.spec("AC-065")
@pytest.mark.spec("AC-069")
@pytest.mark.spec("AC-072")
def test_patience_ends_a_run_after_chances_without_a_gain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left: list[int] = []

    class Watch(Callback):
        def on_evaluation_end(self) -> None:
            assert self.state is not None
            left.append(self.state.patience_left["best_valid_loss"])

    class Scripted(Bowl):
        def validation_step(self, key: str, batch: Any) -> Any:
            loss = torch.tensor([1.0, 0.9, 0.95, 0.96, 0.5][self.state.evaluations_done])
            return {"loss": loss, "accuracy": (batch[0], batch[1])}

    for disabled in (False, True):
        left.clear()
        options: dict[str, Any] = {"patience": {"best_val_loss": 2}, "callback": Watch(), "metrics": Rows()}
        made = trainer(tmp_path / f"{disabled}", hps(epochs=9), disable_model_saving=disabled, **options)
        made.register_model_saving("accuracy")
        made.fit(Scripted(), bowls(96), bowls(32))
        assert left == [2, 2, 1, 0] and made.state.evaluations_done == 4
        assert made.state.patience_left == {"best_valid_loss": 0, "best_accuracy": -1}
        assert capsys.readouterr().err.endswith(
            f"{disabled}: stopped at step 48: best_valid_loss: 2 chances without a gain\n"
        )
    saved = tmp_path / "False" / "best_valid_loss"  # of the second evaluation, and not of a later one
    about = json.loads((saved / "best.json").read_text())
    assert (about["step"], about["epoch"], about["values"]) == (24, 2, [pytest.approx(0.9)])
    assert load_weights(saved)["w"].item() == pytest.approx(2 - 2 * 0.8**24, abs=1e-6)
    made = trainer(tmp_path / "every", hps(epochs=9), metrics=Rows(answers=[0.5, 0.4, 0.7, 0.6, 0.7, 0.8]), patience=2)
    made.register_model_saving("accuracy")
    made.fit(Bowl(), bowls(96), bowls(32))  # the loss gains at each evaluation, the accuracy does not
    assert made.state.evaluations_done == 5 and made.state.patience_left == {"best_valid_loss": 2, "best_accuracy": 0}
    made, _ = fitted(tmp_path / "training", hps(epochs=9, optim_kwargs={"lr": 0.0}), val=None, patience=2)
    assert made.state.epoch == 2 and made.state.patience_left == {"best_train_loss": 0}
    with pytest.raises(ValueError, match="best_f1"):
        fitted(tmp_path / "x", patience={"best_f1": 2})
