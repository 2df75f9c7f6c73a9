"""What projects write beyond the document, and whole projects without a change."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from trainkit.dialects.__main__ import main
from trainkit.dialects.accmt import HyperParameters, Monitor, Optimizer, Scheduler, accelerator

from libs.trainkit.tests.dialects.accmt.bowl import Bowl, Noted, Numbers, bowls, fitted, hps, logged, trainer

pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")
EXAMPLES = Path(__file__).parents[5] / "examples" / "accmt"
RATES: dict[str, Any] = {"monitor": Monitor(learning_rate=True), "log_every": 1, "enable_checkpointing": False}


@pytest.mark.spec("AC-X17")
def test_a_file_names_the_optimizer_with_its_arguments(tmp_path: Path) -> None:
    file = tmp_path / "hps.yaml"
    file.write_text(
        "hps:\n  epochs: 3\n  batch_size: [8, 16]\n  optimizer: {type: AdamW, lr: 1e-3}\n"
        "  scheduler: {type: LinearWithWarmup, warmup_ratio: 0.5}\n"
    )
    read = HyperParameters.from_config(str(file))
    assert (read.optimizer, read.optim_kwargs, read.scheduler) == ("AdamW", {"lr": 1e-3}, "LinearWithWarmup")
    assert read == HyperParameters.from_config(read.to_dict()) and read["batch_sizes"] == (8, 16)
    assert read.get_config() == {
        "epochs": 3,
        "max_steps": None,
        "batch_size": (8, 16),
        "optimizer": "AdamW",
        "lr": 1e-3,
        "scheduler": "LinearWithWarmup",
        "warmup_ratio": 0.5,
    }
    assert HyperParameters.of({"optimizer": "Adam", "optim_kwargs": {"lr": 1e-3}}).optimizer == "Adam"
    with pytest.raises(ValueError, match="optim and optimizer"):
        HyperParameters.of({"optim": {"type": "SGD"}, "optimizer": {"type": "SGD"}})
    with pytest.raises(ValueError, match="optimizer needs a 'type'"):
        HyperParameters.of({"optimizer": {"lr": 1.0}})


@pytest.mark.spec("AC-X17")
def test_members_make_what_they_name() -> None:
    made = Optimizer.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    assert isinstance(made, torch.optim.AdamW) and made.param_groups[0]["lr"] == 0.5
    rates = Scheduler.StepLR(made, step_size=1, gamma=0.1)
    made.step()
    rates.step()
    assert rates.get_last_lr() == pytest.approx([0.05])


def fading(optimizer: Any, num_warmup_steps: int, num_training_steps: int, power: int) -> LambdaLR:
    assert num_warmup_steps == num_training_steps // 4
    return LambdaLR(optimizer, lambda step: (1 - step / num_training_steps) ** power)


@pytest.mark.spec("AC-X17")
def test_classes_and_functions_of_a_script_s_own_are_taken(tmp_path: Path) -> None:
    own = {"scheduler": fading, "scheduler_kwargs": {"warmup_ratio": 0.25, "power": 2}}
    fitted(tmp_path, hps(epochs=1, optimizer=torch.optim.SGD, **own), val=None, **RATES)
    rates = list(logged(tmp_path, "learning_rate").values())
    assert rates == pytest.approx([0.1 * (1 - update / 12) ** 2 for update in range(1, 13)])


@pytest.mark.spec("AC-X21")
def test_callbacks_is_another_name_of_callback(tmp_path: Path) -> None:
    first, second = Noted(), Noted()
    fitted(tmp_path, hps(epochs=1), val=None, callbacks=[first, second])
    assert first.calls.count("on_after_training_step") == second.calls.count("on_after_training_step") == 12
    assert trainer(tmp_path, callbacks=first).callbacks == [first]
    with pytest.raises(ValueError, match="callback and callbacks are two names"):
        trainer(tmp_path, callback=first, callbacks=[second])


class Scheduled(Bowl):
    def __init__(self) -> None:
        super().__init__()
        self.counts: list[tuple[int, int]] = []

    def get_scheduler(self, optimizer: Any, steps_per_epoch: int, epochs: int) -> LambdaLR:
        self.counts.append((steps_per_epoch, epochs))
        return LambdaLR(optimizer, lambda step: 1 - step / (steps_per_epoch * epochs))


@pytest.mark.spec("AC-X22")
def test_a_module_brings_its_own_schedule(tmp_path: Path) -> None:
    module = Scheduled()
    given = hps(scheduler="Constant")
    fitted(tmp_path / "a", given, module=module, val=None, grad_accumulation_steps=2, **RATES)
    assert module.counts == [(6, 2)]
    rates = list(logged(tmp_path / "a", "learning_rate").values())
    assert rates == pytest.approx([0.1 * (1 - update / 12) for update in range(1, 13)])
    for name, changes in (("b", {"max_steps": 5}), ("c", {"step_scheduler_per_epoch": True})):
        fitted(tmp_path / name, hps(**changes), module=module, val=None, enable_checkpointing=False)
    assert module.counts[1:] == [(5, 1), (1, 2)]

    class Wrong(Bowl):
        def get_scheduler(self, optimizer: Any, steps_per_epoch: int, epochs: int) -> Any:
            return 0.1

    with pytest.raises(TypeError, match="get_scheduler has to return a schedule of torch, not a float"):
        fitted(tmp_path / "d", hps(epochs=1), module=Wrong(), val=None)


class Collating(Bowl):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[str, list[int]] = {"train": [], "val": []}
        self.found: list[Any] = []

    def collate_fn_train(self, batch: list[Any]) -> Any:
        self.sizes["train"].append(len(batch))
        return super().collate_fn_train([each[:2] for each in batch])

    def collate_fn_val(self, batch: list[Any]) -> Any:
        self.sizes["val"].append(len(batch))
        return super().collate_fn_val([each[:2] for each in batch])

    def training_step(self, batch: Any) -> Tensor:
        assert len(batch) == 2 and self.optimizer is not None and self.scheduler is not None
        self.found.append((self.device, self.log_every, self.accelerator is accelerator, self.tracker.run_id))
        step = self.state.global_step
        self.log({"due": step}, step=step)
        self.log_({"always": self.optimizer.param_groups[0]["lr"]}, step=step)
        return super().training_step(batch)


@pytest.mark.spec("AC-X23")
def test_a_module_sees_its_run_and_collates_by_itself(tmp_path: Path) -> None:
    module, numbers = Collating(), hps(epochs=1, batch_size=(8, 48), scheduler="Constant")
    options: dict[str, Any] = {"log_every": 5, "collate_fn": lambda batch: None}
    fitted(tmp_path, numbers, module=module, train=Numbers(), val=Numbers(), **options)
    assert module.sizes == {"train": [8] * 12, "val": [48, 48]}
    assert module.found == [(torch.device("cpu"), 5, True, None)] * 12
    assert list(logged(tmp_path, "due")) == [4, 9] and len(logged(tmp_path, "always")) == 12


@pytest.mark.spec("AC-X25")
def test_steps_that_end_within_an_epoch_end_it(tmp_path: Path) -> None:
    noted = Noted()
    made, module = fitted(tmp_path / "a", hps(max_steps=5), callback=noted)
    assert [last for *_, last in module.seen] == [False] * 4 + [True]
    assert (made.state.epoch, made.state.is_end_of_epoch, made.state.evaluations_done) == (0, True, 1)
    mean = sum(4 * 0.64**step for step in range(5)) / 5
    assert logged(tmp_path / "a", "train_loss") == {5: pytest.approx(mean)} == {5: made.state.best_train_loss}
    assert list(logged(tmp_path / "a", "val_loss")) == list(logged(tmp_path / "a", "epoch")) == [5]
    assert (tmp_path / "a" / "best_valid_loss").is_dir() and made.state.num_checkpoints_made == 1
    assert [call for call in noted.calls if call.startswith(("on_epoch", "on_fit"))] == [
        "on_fit_start",
        "on_epoch_start",
        "on_epoch_end",
        "on_fit_end",
    ]
    again = Noted()
    made, _ = fitted(tmp_path / "a", hps(max_steps=5), callback=again)
    assert again.calls.count("on_epoch_end") == 0 and len(logged(tmp_path / "a", "train_loss")) == 1
    fitted(tmp_path / "a", hps(max_steps=9))
    mean = sum(4 * 0.64**step for step in range(9)) / 9
    assert logged(tmp_path / "a", "train_loss")[9] == pytest.approx(mean)
    fitted(tmp_path / "b", hps(max_steps=5), val=None)
    assert (tmp_path / "b" / "best_train_loss").is_dir()


class OwnSets(Bowl):
    def get_validation_dataloader(self, dataset: Any) -> Any:
        assert dataset is None
        return {"a": DataLoader(bowls(16), batch_size=8), 1: DataLoader(bowls(32), batch_size=8)}


@pytest.mark.spec("AC-X23")
def test_a_module_brings_several_validation_loaders_by_key(tmp_path: Path) -> None:
    made, module = fitted(tmp_path, hps(epochs=1), module=OwnSets(), val=None, enable_checkpointing=False)
    assert module.keys == ["a"] * 2 + ["1"] * 4 and set(made.results) == {"a/loss", "1/loss"}
    assert list(logged(tmp_path, "val_loss_a")) == list(logged(tmp_path, "val_loss_1")) == [12]


@pytest.mark.spec("AC-X23")
def test_a_state_has_the_validation_loss_among_the_metrics_and_a_trainer_its_parameters(tmp_path: Path) -> None:
    made, _ = fitted(tmp_path, hps(epochs=1), val={"a": bowls(8), "b": bowls(16)}, evaluate_every_n_steps=12)
    loss = pytest.approx(4 * 0.64**12, rel=1e-5)
    assert made.state.additional_metrics == {"a": {"valid_loss": loss}, "b": {"valid_loss": loss}}
    assert (made.evaluate_every_n_steps, made.clip_grad, made.accelerator) == (12, None, accelerator)
    with pytest.raises(AttributeError, match="Trainer has no attribute 'evaluate_every'"):
        made.evaluate_every  # noqa: B018


class OldStep(Bowl):
    def validation_step(self, batch: Any) -> Any:  # type: ignore[override]
        return {"loss": batch[0].mean()}


@pytest.mark.spec("AC-X10")
def test_a_step_of_an_older_release_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"OldStep.validation_step\(batch.*write validation_step\(self, key, batch\)"):
        fitted(tmp_path, hps(epochs=1), module=OldStep())


@pytest.mark.spec("AC-X17")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hps: 3", "hps: is no mapping of hyperparameters"),
        ("hps:", "hps: is no mapping of hyperparameters"),
        ("hps: {optimizer: 3}", "optimizer=3: give a name"),
        ("hps: {optimizer: {type: 3}}", "optimizer=3: give a name"),
        ("hps: {scheduler: []}", r"scheduler=\[\]: give a name"),
        ("hps: {step_scheduler_per_epoch: 'no'}", "step_scheduler_per_epoch has to be True or False, not 'no'"),
    ],
)
def test_nonsense_in_a_file_is_refused_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "hps.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        HyperParameters.from_config(str(tmp_path / "hps.yaml"))


@pytest.mark.spec("AC-X21")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"callback": 3}, "callback has 3: give an instance of a class that derives from Callback"),
        ({"callbacks": [Noted]}, "callback has <class"),
        ({"metrics": "accuracy"}, "metrics has 'accuracy': give an instance of a class that derives from Metric"),
        ({"metrics": {"0": ["accuracy"]}}, "metrics has 'accuracy'"),
        ({"monitor": 3}, "monitor=3: give a Monitor"),
        ({"log_every": "5"}, "log_every is -1, None or 1 and more, not '5'"),
        ({"patience": "3"}, "patience is a whole number of evaluations, or one for each rule, not '3'"),
        ({"patience": {"best_valid_loss": 1.5}}, "patience is a whole number"),
        ({"eval_when_start": "no"}, "eval_when_start has to be True or False, not 'no'"),
        ({"compile": 1}, "compile has to be True or False, not 1"),
    ],
)
def test_nonsense_for_a_trainer_is_refused_with_its_name(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **options)


def script(folder: str, name: str) -> None:
    assert importlib.util.find_spec("evaluate") is None and importlib.util.find_spec("accmt") is None
    os.chdir(folder)
    sys.argv = ["trainkit.dialects", "run", name]
    main()


def run(forks: Any, folder: Path, name: str) -> str:
    """Runs a script of the examples without a change, and returns what it printed."""
    for file in EXAMPLES.iterdir():
        if file.suffix in (".py", ".yaml"):
            (folder / file.name).symlink_to(file)
    forks.succeed(script, folder, imports=["optuna", "sklearn.datasets"], name=f"{name}.py")
    return (folder / "rank-0.log").read_text()


@pytest.mark.spec("AC-X24")
def test_a_project_trains_from_a_file_and_evaluates_its_test_set(forks: Any, tmp_path: Path) -> None:
    printed = run(forks, tmp_path, "train")
    seen = logged(tmp_path / "runs" / "digits", "accuracy")
    assert list(seen) == [24, 48, 72] and seen[72] > 0.9
    rates = logged(tmp_path / "runs" / "digits", "learning_rate")
    assert rates == {step: pytest.approx(1e-2 * (72 - step) / 65) for step in (24, 48, 72)}
    assert [f"epoch {epoch}: {each:.3f}" in printed for epoch, each in enumerate(seen.values())] == [True] * 3
    found = json.loads((tmp_path / "results.json").read_text())
    # Of 300 images: a whole number of them is recognised.
    assert found["accuracy"] > 0.8 and found["accuracy"] * 300 == pytest.approx(
        round(found["accuracy"] * 300), abs=1e-3
    )
    assert f"parameters: 4810, test accuracy: {found['accuracy']:.3f}\n" in printed


@pytest.mark.spec("AC-X24")
def test_a_project_searches_and_prints_its_best_trial(forks: Any, tmp_path: Path) -> None:
    printed = run(forks, tmp_path, "search")
    logs = sorted((tmp_path / "hp_search").glob("trial-*/metrics.jsonl"))
    best = max(each for log in logs for each in logged(log.parent, "accuracy").values())
    assert len(logs) == 2 and f"Best of 2 trials in hp_search: {best:g}\n" in printed
    assert re.search(
        r"\n  train_batch_size: (50|100)\n  learning_rate: 0\.0\d+\n  scheduler: (linear|constant)", printed
    )


@pytest.mark.spec("AC-X24")
def test_a_project_has_a_schedule_of_its_own(forks: Any, tmp_path: Path) -> None:
    assert "steps: 24, last rate: 0\n" in run(forks, tmp_path, "schedule")
    rates = logged(tmp_path / "runs" / "schedule", "rate")
    assert rates == {step: pytest.approx(1e-2 * (1 - step / 24) ** 2) for step in range(24)}


@pytest.mark.spec("AC-X24")
def test_a_project_updates_by_itself(forks: Any, tmp_path: Path) -> None:
    printed = run(forks, tmp_path, "extended")
    accuracy = logged(tmp_path / "runs" / "extended", "accuracy")[48]
    assert accuracy > 0.9 and f"accuracy: {accuracy:.3f}\n" in printed
