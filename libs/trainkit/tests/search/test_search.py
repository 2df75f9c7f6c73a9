"""Search: what is tried, what is given up, what a killed search goes on with."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainkit.config import RunConfig, load, parse
from trainkit.errors import InvalidSetup
from trainkit.search import Choice, Pruned, Search, Space, Task, Uniform, in_process
from trainkit.search.space import changed
from trainkit.trainer import Trainer


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield


@dataclass(frozen=True, kw_only=True)
class Bowl:
    """Settings of a bowl with its floor at lr = 1e-4."""

    lr: float = 1e-3
    depth: int = 1
    kind: str = "plain"


def depth_of_bowl(task: Task[Bowl]) -> float:
    return (math.log10(task.config.lr) + 4) ** 2


def bowl(folder: Path, **settings: Any) -> Search[Bowl]:
    given: dict[str, Any] = {"space": {"lr": Uniform(1e-3, 1e-7, log=True)}, "run": depth_of_bowl, **settings}
    return Search(config=Bowl(), folder=folder, **given)


@pytest.mark.parametrize(("direction", "best"), [("minimize", min), ("maximize", max)])
def test_the_best_trial_is_found_and_its_settings_are_a_file_to_use(direction: Any, best: Any, tmp_path: Path) -> None:
    result = bowl(tmp_path, direction=direction).optimize(10)
    assert result.value == best(trial.value for trial in result.trials)
    assert result.value == pytest.approx((math.log10(result.config.lr) + 4) ** 2)
    assert load(tmp_path / "best.yaml", Bowl) == result.config == load(result.folder / "config.yaml", Bowl)
    assert len(list(tmp_path.glob("trial-*/config.yaml"))) == 10


def test_values_come_from_their_ranges_by_orders_of_magnitude_and_whole_numbers_stay_whole(tmp_path: Path) -> None:
    space: Space = {"lr": Uniform(1e-3, 1e-7, log=True), "depth": Uniform(4, 2), "kind": Choice(("a", "b"))}
    search = bowl(tmp_path, space=space, sampler=optuna.samplers.RandomSampler(seed=3))
    drawn = [trial.parameters for trial in search.optimize(50).trials]
    assert all(1e-7 <= each["lr"] <= 1e-3 for each in drawn)
    assert 15 <= sum(each["lr"] < 1e-5 for each in drawn) <= 35
    assert {each["depth"] for each in drawn} == {2, 3, 4} and {each["kind"] for each in drawn} == {"a", "b"}


def test_a_choice_may_be_among_components(tmp_path: Path) -> None:
    config = parse("{max_duration: 1ep, batch_size: 8, optimizer: SGD}", RunConfig)
    choices = Choice(({"type": "StepLR", "step_size": 3}, {"type": "LinearWithWarmup", "num_warmup_steps": 2}, None))
    seen = []

    def run(task: Task[RunConfig]) -> float:
        seen.append(task.config.schedule)
        return float(task.config.schedule is None)

    result = Search(config=config, space={"schedule": choices}, run=run, folder=tmp_path).optimize(12)
    assert {each.type if each else None for each in seen} == {"StepLR", "LinearWithWarmup", None}
    assert result.config.schedule is not None


def test_a_failed_trial_is_recorded_and_the_search_goes_on(tmp_path: Path) -> None:
    def sometimes(task: Task[Bowl]) -> float:
        if task.number % 2:
            raise RuntimeError("out of memory")
        return float(task.number)

    result = bowl(tmp_path, run=sometimes).optimize(4)
    assert [(trial.number, trial.state, trial.value) for trial in result.trials] == [
        (0, "complete", 0.0),
        (1, "failed", None),
        (2, "complete", 2.0),
        (3, "failed", None),
    ]
    assert bowl(tmp_path, run=sometimes).optimize(4).value == 0.0  # nothing is run again


def test_a_search_without_any_result_says_so(tmp_path: Path) -> None:
    def never(task: Task[Bowl]) -> float:
        raise RuntimeError("broken")

    with pytest.raises(InvalidSetup, match="none of 2 trials was completed"):
        bowl(tmp_path, run=never).optimize(2)


KILLED = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_search import Bowl, bowl, depth_of_bowl

def run(task):
    with open(Path(sys.argv[2]) / "ran", "a") as ran:
        ran.write(f"{task.number}\\n")
    if task.number == 4:
        os.kill(os.getpid(), 9)
    return depth_of_bowl(task)

bowl(Path(sys.argv[2]), run=run).optimize(10)
"""


def test_a_killed_search_goes_on_and_tries_the_abandoned_values_again(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path)]
    assert subprocess.run(command, check=False, env={**os.environ}).returncode == -9
    assert (tmp_path / "ran").read_text().split() == ["0", "1", "2", "3", "4"]
    ran = []

    def run(task: Task[Bowl]) -> float:
        ran.append(task)
        return depth_of_bowl(task)

    result = bowl(tmp_path, run=run).optimize(10)
    assert [task.number for task in ran] == [5, 6, 7, 8, 9]
    abandoned = next(trial for trial in result.trials if trial.number == 4)
    assert abandoned.state == "failed" and ran[0].config.lr == abandoned.parameters["lr"]
    assert len(result.trials) == 10


def test_a_path_that_the_configuration_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetup, match=r"'lr\.x' is no place in the configuration"):
        bowl(tmp_path, space={"lr.x": Uniform(0.1, 1.0)})
    with pytest.raises(InvalidSetup, match=r"lrr: unknown key.*did you mean lr\?"):
        bowl(tmp_path, space={"lrr": Uniform(0.1, 1.0)})
    with pytest.raises(InvalidSetup, match="orders of magnitude need a range above 0"):
        Uniform(0.0, 1.0, log=True)
    assert changed({"a": [{"b": 1}, {"b": 2}]}, "a[1].b", 3) == {"a": [{"b": 1}, {"b": 3}]}


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any) -> Tensor:
        return ((self.w * batch[0] - 2) ** 2).mean()


def test_real_runs_are_searched_and_hopeless_ones_are_given_up(tmp_path: Path) -> None:
    text = "{max_duration: 6ep, batch_size: 8, optimizer: {type: SGD, lr: 0.1}, checkpoints: null}"
    data, modules, steps = TensorDataset(torch.ones(24, 1)), [], []

    def make(task: Task[RunConfig]) -> Trainer:
        modules.append(Line())
        return task.config.trainer(module=modules[-1], train=data, evaluate=data, device="cpu")

    inner = in_process(make)

    def run(task: Task[RunConfig]) -> float:
        try:
            return inner(task)
        except Pruned:
            steps.append(task.number)
            raise

    space = {"optimizer.lr": Choice((0.3, 0.2, 1e-4, 2e-4))}
    grid = optuna.samplers.GridSampler({"optimizer.lr": [0.3, 0.2, 1e-4, 2e-4]}, seed=0)
    search = Search(
        config=parse(text, RunConfig),
        space=space,
        run=run,
        folder=tmp_path,
        sampler=grid,
        pruner=optuna.pruners.ThresholdPruner(upper=1.0, n_warmup_steps=3),
    )
    result = search.optimize(4)
    assert result.config.optimizer.arguments["lr"] in (0.3, 0.2) and result.value < 1e-6
    pruned = [trial for trial in result.trials if trial.state == "pruned"]
    assert sorted(trial.parameters["optimizer.lr"] for trial in pruned) == [1e-4, 2e-4]
    assert steps == [trial.number for trial in pruned]
    assert len({id(module) for module in modules}) == 4
    assert all(
        abs(module.w.item()) < 0.1 for module, trial in zip(modules, result.trials, strict=True) if trial in pruned
    )
