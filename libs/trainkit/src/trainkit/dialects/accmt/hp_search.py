"""`HyperParameterSearch`: trials of the dialect's trainer, drawn and kept by `trainkit.search`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainkit import catalogue
from trainkit.dialects.accmt.hyperparameters import HyperParameters
from trainkit.dialects.accmt.module import AcceleratorModule
from trainkit.dialects.accmt.trainer import Trainer
from trainkit.errors import InvalidSetup
from trainkit.search import Choice, Search, SearchResult, Task, Uniform

_BY_MAGNITUDE = ("learning_rate", "eps")
_OPTIMIZERS = ("AdamW", "Adam")
_RATES = [1e-3, 1e-7]


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What one trial trains with; see `HyperParameterSearch.set_parameters`."""

    train_batch_size: int = 1
    epochs: int = 1
    max_steps: int | None = None
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    scheduler: str | None = None
    warmup_ratio: float = 0.1
    step_scheduler_per_epoch: bool = False
    optimizer: str = "AdamW"
    eval_batch_size: int | None = None


class HyperParameterSearch:
    """Tries hyperparameters, each in a run of its own, with Optuna.

    Args:
        get_module_fn: makes a fresh module for each trial.
        train_dataset, val_dataset: as for `Trainer.fit`.
        metrics: as for the trainer; without them the objective is the validation loss.
        trainer_kwargs: of every trainer; `model_path` is the folder of the study and of its trials, `hp_search` unless
            given.

    Raises:
        TypeError: `hps_config` or `resume` is among them.
    """

    def __init__(
        self,
        get_module_fn: Callable[[], AcceleratorModule],
        train_dataset: Any,
        val_dataset: Any,
        metrics: Any = None,
        **trainer_kwargs: Any,
    ) -> None:
        for name in ("hps_config", "resume"):
            if name in trainer_kwargs:
                raise TypeError(f"{name} is not for a search: trials draw their own values, and start from nothing")
        self._folder = Path(trainer_kwargs.pop("model_path", "hp_search"))
        self._get_module, self._sets = get_module_fn, (train_dataset, val_dataset)
        self._options: dict[str, Any] = {"metrics": metrics, **trainer_kwargs}
        self._space: dict[str, Uniform | Choice] = {}
        self._fixed: dict[str, Any] = {}
        self._schedules: dict[str, Any] = {}
        self.set_parameters()

    def set_parameters(
        self,
        *,
        train_batch_size: Any = 1,
        epochs: Any = 1,
        max_steps: Any = None,
        learning_rate: Any = _RATES,
        beta1: Any = 0.9,
        beta2: Any = 0.999,
        eps: Any = 1e-8,
        weight_decay: Any = 0.01,
        scheduler: Any = None,
        warmup_ratio: Any = 0.1,
        step_scheduler_per_epoch: bool = False,
        optimizer: str = "AdamW",
        eval_batch_size: int | None = None,
    ) -> None:
        """Says what is searched: one value is fixed, a list is a range in any order, a tuple is choices.

        Args:
            train_batch_size: a list is choices as well.
            epochs, max_steps: the length of a trial; `max_steps` goes first.
            learning_rate, eps: ranges are drawn by orders of magnitude.
            beta1, beta2, weight_decay, warmup_ratio: of the optimizer, and the schedule's warm-up.
            scheduler: a name; or choices, as a mapping of names to schedules: a name, or `(name, arguments)`.
            step_scheduler_per_epoch, optimizer, eval_batch_size: fixed for all trials; the optimizer is AdamW or Adam.

        Raises:
            InvalidSetup: both `epochs` and `max_steps` are searched, or the optimizer is another.
        """
        given = {name: value for name, value in locals().items() if name != "self"}
        if _is_searched(epochs) and _is_searched(max_steps):
            raise InvalidSetup("epochs and max_steps are both searched: max_steps would go first, so search one")
        if optimizer not in _OPTIMIZERS:
            raise InvalidSetup(f"optimizer={optimizer!r}: a search takes {' or '.join(_OPTIMIZERS)}")
        self._schedules = dict(scheduler) if isinstance(scheduler, Mapping) else {"": scheduler}
        given["scheduler"] = tuple(self._schedules) if len(self._schedules) > 1 else next(iter(self._schedules))
        self._space, self._fixed = {}, {}
        for name, value in given.items():
            distribution = _distribution(name, value)
            if distribution is None:
                self._fixed[name] = value
            else:
                self._space[name] = distribution

    def optimize(
        self,
        best_metric_fn: Callable[[dict[str, Any]], float] | None = None,
        direction: Literal["minimize", "maximize"] = "minimize",
        n_trials: int = 10,
    ) -> SearchResult[Draw]:
        """Runs trials until the study in `model_path` has `n_trials`, those of earlier lives included.

        Args:
            best_metric_fn: the objective, from the last evaluation's metrics and `valid_loss`: by the names under which
                they are logged, and those of one dataset in a mapping under its key (`m["0"]["accuracy"]`). Default:
                the validation loss.
            direction: whether the least or the greatest value is best.
            n_trials: of the whole study.

        Returns:
            The best `parameters` and `value`, the `folder` of that trial, and all `trials`.
        """

        def run(task: Task[Draw]) -> float:
            return self._run(task, best_metric_fn)

        config = Draw(**self._fixed)
        result = Search(
            config=config, space=self._space, run=run, folder=self._folder, direction=direction, pruner=None
        ).optimize(n_trials)
        listed = "".join(f"\n  {name}: {value}" for name, value in result.parameters.items())
        sys.stdout.write(f"Best of {len(result.trials)} trials in {self._folder}: {result.value:g}{listed}\n")
        return result

    def get_hps(self, trial: Any) -> HyperParameters:
        """The hyperparameters that a trial of Optuna draws."""
        drawn = {name: each.draw(trial, name) for name, each in self._space.items()}
        return self._hyperparameters(Draw(**{**self._fixed, **drawn}))

    def _run(self, task: Task[Draw], best_metric_fn: Callable[[dict[str, Any]], float] | None) -> float:
        trainer = Trainer(self._hyperparameters(task.config), task.folder, resume=False, **self._named(task))
        trainer.fit(self._get_module(), *self._sets)
        metrics = trainer.state.additional_metrics
        losses = {key: trainer.results[f"{key}/loss"] for key in metrics if f"{key}/loss" in trainer.results}
        if not losses:
            raise InvalidSetup("nothing was evaluated, so there is no objective: give the search a val_dataset")
        loss = sum(losses.values()) / len(losses)
        if best_metric_fn is None:
            return loss
        by_set = {key: {**metrics[key], "valid_loss": each} for key, each in losses.items()}
        return float(best_metric_fn({**by_set, **_flat(metrics), "valid_loss": loss}))

    def _named(self, task: Task[Draw]) -> dict[str, Any]:
        """A trial's options: with a tracker, its run lies under the study's name and has the trial's."""
        if self._options.get("log_with") is None:
            return self._options
        name = self._options.get("track_name") or self._folder.name
        return {**self._options, "track_name": name, "run_name": task.folder.name}

    def _hyperparameters(self, draw: Draw) -> HyperParameters:
        name, arguments = _schedule(self._schedules[draw.scheduler or ""])
        if name is not None and _warms_up(name) and "num_warmup_steps" not in arguments:
            arguments = {**arguments, "warmup_ratio": draw.warmup_ratio}
        return HyperParameters(
            epochs=draw.epochs,
            max_steps=draw.max_steps,
            batch_size=(draw.train_batch_size, draw.eval_batch_size or draw.train_batch_size),
            optimizer=draw.optimizer,
            optim_kwargs={
                "lr": draw.learning_rate,
                "betas": (draw.beta1, draw.beta2),
                "eps": draw.eps,
                "weight_decay": draw.weight_decay,
            },
            scheduler=name,
            scheduler_kwargs=arguments or None,
            step_scheduler_per_epoch=draw.step_scheduler_per_epoch,
        )


def _is_searched(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _distribution(name: str, value: Any) -> Uniform | Choice | None:
    """What a value is drawn from; None: it is fixed."""
    if isinstance(value, tuple) or (isinstance(value, list) and name == "train_batch_size"):
        return Choice(tuple(value))
    if not isinstance(value, list):
        return None
    if len(value) != 2:
        raise InvalidSetup(f"{name}={value!r}: a range has two ends; for choices give a tuple")
    return Uniform(value[0], value[1], log=name in _BY_MAGNITUDE)


def _schedule(given: Any) -> tuple[Any, dict[str, Any]]:
    """A schedule's name, class or function, and its arguments."""
    name, arguments = given if isinstance(given, tuple) else (given, {})
    return name, dict(arguments)


def _warms_up(schedule: str | Callable[..., Any]) -> bool:
    if isinstance(schedule, str):
        return "num_warmup_steps" in (catalogue.arguments("schedule", schedule) or {})
    return "num_warmup_steps" in inspect.signature(schedule).parameters


def _flat(metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Metrics of all datasets, by the names under which they are logged."""
    several = len(metrics) > 1
    return {name + f"_{key}" * several: value for key, named in metrics.items() for name, value in named.items()}
