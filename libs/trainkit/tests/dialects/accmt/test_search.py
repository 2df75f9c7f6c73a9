"""Hyperparameter search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from trainkit.dialects.accmt.callbacks import Callback
from trainkit.dialects.accmt.hp_search import HyperParameterSearch
from trainkit.search import Choice, Uniform

from libs.trainkit.tests.dialects.accmt.bowl import Bowl, Rows, bowls

pytestmark = [
    pytest.mark.filterwarnings("ignore:validation_step returned"),
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
]


class Kill(BaseException):
    """What a signal would do."""


def search(folder: Path, made: list[Any], samples: int = 16, **options: Any) -> HyperParameterSearch:
    def module() -> Bowl:
        made.append(Bowl())
        return made[-1]

    settings: dict[str, Any] = {"clip_grad": None, "dataloader_num_workers": 0, "enable_checkpointing": False}
    return HyperParameterSearch(module, bowls(samples), bowls(8), **{**settings, "model_path": folder, **options})


@pytest.mark.spec("AC-141")
def test_every_trial_has_its_own_module_and_folder(tmp_path: Path) -> None:
    made: list[Any] = []
    searched = search(tmp_path / "study", made)
    searched.set_parameters(train_batch_size=8, learning_rate=[1e-3, 1e-1])
    result = searched.optimize(n_trials=3)
    assert len(made) == 3 and len({id(module) for module in made}) == 3
    folders = sorted(path for path in (tmp_path / "study").iterdir() if path.is_dir())
    assert len(folders) == 3 and all((folder / "best_valid_loss").is_dir() for folder in folders)
    assert result.value == min(trial.value for trial in result.trials) and result.folder in folders
    with pytest.raises(TypeError, match="hps_config"):
        search(tmp_path, [], hps_config={})


@pytest.mark.spec("AC-X20")
def test_a_search_needs_no_folder_and_sees_metrics_by_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[Any] = []

    def objective(metrics: Any) -> float:
        seen.append(metrics)
        return float(metrics["0"]["valid_loss"])

    options: dict[str, Any] = {"dataloader_num_workers": 0, "enable_checkpointing": False, "clip_grad": None}
    searched = HyperParameterSearch(Bowl, bowls(16), bowls(8), metrics=[Rows()], **options)
    searched.set_parameters(train_batch_size=8, learning_rate=[1e-2, 1e-1])
    result = searched.optimize(objective, n_trials=2)
    assert result.folder.parent == Path("hp_search") and (tmp_path / "hp_search").is_dir()
    assert [each["0"]["accuracy"] for each in seen] == [each["accuracy"] for each in seen] == [0.5, 0.5]
    assert result.value == min(each["valid_loss"] for each in seen)
    assert f"Best of 2 trials in hp_search: {result.value:g}\n  learning_rate: " in capsys.readouterr().out
    drawn = searched.get_hps(optuna.create_study().ask())
    assert drawn.batch_size == (8, 8) and 1e-2 <= drawn["optim_kwargs"]["lr"] <= 1e-1


@pytest.mark.spec("AC-142")
def test_lists_are_ranges_and_tuples_are_choices(tmp_path: Path) -> None:
    searched = search(tmp_path, [])
    searched.set_parameters(train_batch_size=[16, 32], weight_decay=(0.1, 0.2), epochs=[3, 1], max_steps=None)
    space = searched._space
    assert space["train_batch_size"] == Choice((16, 32)) and space["weight_decay"] == Choice((0.1, 0.2))
    assert space["learning_rate"] == Uniform(1e-3, 1e-7, log=True)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    drawn = [
        {name: each.draw(trial, name) for name, each in space.items()} for trial in (study.ask() for _ in range(50))
    ]
    rates = [each["learning_rate"] for each in drawn]
    assert all(1e-7 <= rate <= 1e-3 for rate in rates)
    assert 15 <= sum(rate < 1e-5 for rate in rates) <= 35
    assert {each["train_batch_size"] for each in drawn} == {16, 32}
    assert {each["weight_decay"] for each in drawn} == {0.1, 0.2}
    assert {each["epochs"] for each in drawn} == {1, 2, 3}
    with pytest.raises(ValueError, match="epochs and max_steps"):
        searched.set_parameters(epochs=[1, 2], max_steps=[5, 9])
    with pytest.raises(ValueError, match="SGD"):
        searched.set_parameters(optimizer="SGD")


@pytest.mark.spec("AC-143")
def test_a_schedule_warms_up_for_its_share_of_all_updates(tmp_path: Path) -> None:
    rates: list[float] = []

    class Watch(Callback):
        def on_after_optimizer_step(self, optimizer: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    searched = search(tmp_path / "warm", [], samples=800, callback=Watch())
    schedules = {"warm": "ConstantWithWarmup", "again": "ConstantWithWarmup"}
    searched.set_parameters(max_steps=100, train_batch_size=8, learning_rate=1.0, scheduler=schedules, warmup_ratio=0.1)
    searched.optimize(n_trials=1)
    assert rates[:12] == pytest.approx([0.1 * min(step, 10) for step in range(12)])
    rates.clear()
    searched = search(tmp_path / "plain", [], callback=Watch())
    searched.set_parameters(max_steps=5, train_batch_size=8, learning_rate=[0.5, 1.0], scheduler="Constant")
    searched.optimize(n_trials=1)
    assert len(set(rates)) == 1


@pytest.mark.spec("AC-144")
@pytest.mark.parametrize(("direction", "best"), [("minimize", min), ("maximize", max)])
def test_a_search_that_was_killed_runs_only_the_rest(tmp_path: Path, direction: Any, best: Any) -> None:
    trained: list[Any] = []

    def searched(killed: bool) -> HyperParameterSearch:
        made = search(tmp_path, trained, metrics=Rows())
        made.set_parameters(train_batch_size=16, learning_rate=[1e-4, 1.0], max_steps=1)
        original = made._get_module

        def module() -> Any:
            if killed and len(trained) == 4:
                raise Kill
            return original()

        made._get_module = module
        return made

    def bowl(metrics: dict[str, Any]) -> float:
        assert metrics["accuracy"] == 0.5
        return abs(metrics["valid_loss"] - 1.0)

    with pytest.raises(Kill):
        searched(True).optimize(bowl, direction, n_trials=10)
    assert len(trained) == 4
    result = searched(False).optimize(bowl, direction, n_trials=11)
    done = [trial for trial in result.trials if trial.state == "complete"]
    assert len(trained) == len(done) == 10  # the one that was killed is recorded, and its values were tried again
    assert result.value == best(trial.value for trial in done)
    assert result.parameters["learning_rate"] == result.config.learning_rate
