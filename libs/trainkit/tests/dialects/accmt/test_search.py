"""Hyperparameter search."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from trainkit.dialects.accmt.callbacks import Callback
from trainkit.dialects.accmt.hp_search import HyperParameterSearch
from trainkit.search import Choice, Uniform

from libs.trainkit.tests.dialects.accmt.bowl import Bowl, Rows, bowls, logged

pytestmark = [
    pytest.mark.filterwarnings("ignore:validation_step returned"),
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
]


class Kill(BaseException):
    """What a signal would do."""


class Steps(Callback):
    """Notes the steps that were taken, and the settings of their optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[int] = []
        self.groups: list[dict[str, Any]] = []
        self.kinds: list[type] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.state is not None
        self.taken.append(self.state.global_step + 1)
        self.kinds.append(type(optimizer))
        group = optimizer.param_groups[0]
        self.groups.append({name: group[name] for name in ("lr", "betas", "eps", "weight_decay")})


def search(folder: Path, made: list[Any], samples: int = 16, **options: Any) -> HyperParameterSearch:
    def module() -> Bowl:
        made.append(Bowl())
        return made[-1]

    settings: dict[str, Any] = {"clip_grad": None, "dataloader_num_workers": 0, "enable_checkpointing": False}
    return HyperParameterSearch(module, bowls(samples), bowls(8), **{**settings, "model_path": folder, **options})


@pytest.mark.spec("AC-141")
def test_every_trial_has_its_own_module_and_folder(tmp_path: Path) -> None:
    made: list[Any] = []
    steps = Steps()
    searched = search(tmp_path / "study", made, callback=steps, log_every=1, enable_checkpointing=True)
    searched.set_parameters(train_batch_size=8, learning_rate=[1e-3, 1e-1])
    result = searched.optimize(n_trials=3)
    assert len(made) == 3 and len({id(module) for module in made}) == 3
    folders = sorted(path for path in (tmp_path / "study").iterdir() if path.is_dir())
    assert len(folders) == 3 and all((folder / "best_valid_loss").is_dir() for folder in folders)
    # Without metrics, the objective is the validation loss; a trainer's settings are those of the search.
    assert [trial.value for trial in result.trials] == [logged(folder, "val_loss")[2] for folder in folders]
    assert all(list(logged(folder, "train_loss")) == [1, 2] for folder in folders)
    assert result.value == min(trial.value for trial in result.trials) and result.folder in folders
    # A trial begins from nothing, whatever its folder holds.
    (tmp_path / "study" / "study.log").unlink()
    steps.taken.clear()
    searched.optimize(n_trials=1)
    assert steps.taken == [1, 2] and len(made) == 4
    for wrong in ("hps_config", "resume"):
        with pytest.raises(TypeError, match=f"{wrong} is not for a search"):
            search(tmp_path, [], **{wrong: {}})


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
    searched.set_parameters(eps=[1e-9, 1e-3], beta1=[0.5, 0.9], warmup_ratio=[0.5, 0.1], max_steps=(10, 20))
    space = searched._space
    assert space["eps"] == Uniform(1e-9, 1e-3, log=True) and space["beta1"] == Uniform(0.5, 0.9)
    assert space["warmup_ratio"] == Uniform(0.5, 0.1) and space["max_steps"] == Choice((10, 20))
    with pytest.raises(ValueError, match="epochs and max_steps"):
        searched.set_parameters(epochs=[1, 2], max_steps=[5, 9])
    with pytest.raises(ValueError, match="SGD"):
        searched.set_parameters(optimizer="SGD")
    defaults = [(each.name, each.default) for each in inspect.signature(searched.set_parameters).parameters.values()]
    assert defaults == [
        ("train_batch_size", 1),
        ("epochs", 1),
        ("max_steps", None),
        ("learning_rate", [1e-3, 1e-7]),
        ("beta1", 0.9),
        ("beta2", 0.999),
        ("eps", 1e-8),
        ("weight_decay", 0.01),
        ("scheduler", None),
        ("warmup_ratio", 0.1),
        ("step_scheduler_per_epoch", False),
        ("optimizer", "AdamW"),
        ("eval_batch_size", None),
    ]


@pytest.mark.spec("AC-142")
def test_a_trial_trains_with_what_it_drew(tmp_path: Path) -> None:
    made: list[Any] = []
    steps = Steps()
    searched = search(tmp_path / "fixed", made, callback=steps)
    fixed: dict[str, Any] = {"beta1": 0.7, "beta2": 0.8, "eps": 1e-6, "weight_decay": 0.3, "optimizer": "Adam"}
    halved = ("StepLR", {"step_size": 1, "gamma": 0.5})
    fixed |= {"scheduler": halved, "step_scheduler_per_epoch": True}
    searched.set_parameters(train_batch_size=[8], epochs=3, learning_rate=0.5, eval_batch_size=2, **fixed)
    result = searched.optimize(n_trials=1)
    others = {"betas": (0.7, 0.8), "eps": 1e-6, "weight_decay": 0.3}
    assert steps.groups == [{"lr": lr, **others} for lr in (0.5, 0.5, 0.25, 0.25, 0.125, 0.125)]
    assert set(steps.kinds) == {torch.optim.Adam} and len(made[0].keys) == 3 * 4
    assert result.parameters == {"train_batch_size": 8}

    steps = Steps()
    searched = search(tmp_path / "drawn", made, samples=8, callback=steps)
    schedules = {"halved": halved, "same": "Constant"}
    searched.set_parameters(train_batch_size=4, epochs=9, max_steps=2, learning_rate=(1.0,), scheduler=schedules)
    result = searched.optimize(n_trials=6)
    rates = [[group["lr"] for group in steps.groups[at : at + 2]] for at in range(0, 12, 2)]
    drawn = [trial.parameters.get("scheduler") for trial in result.trials]
    assert rates == [[1.0, 0.5] if name == "halved" else [1.0, 1.0] for name in drawn]
    assert set(drawn) == set(schedules) and set(steps.kinds) == {torch.optim.AdamW}
    # The evaluation's batch size is that of training unless given: 8 samples are 2 batches.
    assert all(len(module.keys) == 2 for module in made[1:])


@pytest.mark.spec("AC-143")
def test_a_schedule_warms_up_for_its_share_of_all_updates(tmp_path: Path) -> None:
    rates: list[float] = []

    class Watch(Callback):
        def on_after_optimizer_step(self, optimizer: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    searched = search(tmp_path / "warm", [], samples=19 * 8, callback=Watch())
    schedules = {"warm": "ConstantWithWarmup", "again": "ConstantWithWarmup"}
    searched.set_parameters(
        max_steps=19, train_batch_size=8, learning_rate=1.0, scheduler=schedules, warmup_ratio=0.3, epochs=7
    )
    searched.optimize(n_trials=1)
    # 0.3 * 19 is 5.7: 6 updates warm up.
    assert rates == pytest.approx([min(step / 6, 1.0) for step in range(19)])
    rates.clear()
    searched = search(tmp_path / "given", [], samples=4 * 8, callback=Watch())
    given = {
        "own": ("ConstantWithWarmup", {"num_warmup_steps": 2}),
        "again": ("ConstantWithWarmup", {"num_warmup_steps": 2}),
    }
    searched.set_parameters(max_steps=4, train_batch_size=8, learning_rate=1.0, scheduler=given, warmup_ratio=0.9)
    searched.optimize(n_trials=1)
    assert rates == [0.0, 0.5, 1.0, 1.0]
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

    given: list[dict[str, Any]] = []

    def bowl(metrics: dict[str, Any]) -> float:
        given.append({name: metrics[name] for name in ("accuracy", "other")})
        return abs(metrics["valid_loss"] - 1.0)

    with pytest.raises(Kill):
        searched(True).optimize(bowl, direction, n_trials=10)
    assert len(trained) == 4
    result = searched(False).optimize(bowl, direction, n_trials=11)
    done = [trial for trial in result.trials if trial.state == "complete"]
    assert len(trained) == len(done) == 10  # the one that was killed is recorded, and its values were tried again
    assert result.value == best(trial.value for trial in done)
    rates = [trial.parameters["learning_rate"] for trial in done]
    assert len(set(rates)) == 10  # nothing is tried twice
    # The values that the killed trial had drawn are tried again, first of all.
    killed = result.trials[4]
    assert killed.state == "failed" and killed.parameters == result.trials[5].parameters
    chosen = next(trial for trial in done if trial.value == result.value)
    assert result.parameters == chosen.parameters and result.folder == tmp_path / f"trial-{chosen.number:04}"
    assert result.parameters["learning_rate"] == result.config.learning_rate
    assert given == [{"accuracy": 0.5, "other": 0.25}] * 10
    values = [abs(logged(tmp_path / f"trial-{trial.number:04}", "val_loss")[1] - 1.0) for trial in done]
    assert [trial.value for trial in done] == values and len(set(values)) > 1
    assert searched(False).optimize(bowl, direction, n_trials=11) == result and len(trained) == 10


@pytest.mark.spec("AC-144")
def test_a_search_goes_on_after_a_trial_that_failed(tmp_path: Path) -> None:
    errors: list[Any] = [RuntimeError("broken"), torch.OutOfMemoryError("CUDA out of memory"), None, None]
    values = [float("nan"), 3.0]

    class Fails(Bowl):
        def training_step(self, batch: Any) -> Any:
            if (error := errors.pop(0)) is not None:
                raise error
            return super().training_step(batch)

    searched = search(tmp_path, [], safe_steps=False, disable_model_saving=True)
    searched._get_module = Fails
    searched.set_parameters(train_batch_size=16, learning_rate=[1e-4, 1.0])
    try:
        result = searched.optimize(lambda metrics: values.pop(0), n_trials=4)
    except (RuntimeError, ValueError) as error:
        pytest.fail(f"the search ended: {error!r}")
    assert [trial.state for trial in result.trials] == ["failed", "failed", "failed", "complete"]
    assert result.value == 3.0 and result.folder == tmp_path / "trial-0003"
    assert list(inspect.signature(searched.optimize).parameters.values())[1].default == "minimize"
    assert list(inspect.signature(searched.optimize).parameters.values())[2].default == 10
