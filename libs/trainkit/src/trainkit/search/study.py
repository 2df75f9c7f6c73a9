"""Hyperparameter search: samplers and pruners of Optuna, trials run by a `Runner`.

A study is a file: a search that was killed goes on where it was. What a trial is, is up to its runner: a run in this
process (`in_process`), a job of a yard (`Jobs`), or any function.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

from trainkit.config import from_dict
from trainkit.config.saving import save, to_dict
from trainkit.errors import InvalidSetup
from trainkit.extras import require
from trainkit.search.space import Space, changed

C = TypeVar("C")
log = logging.getLogger(__name__)

STUDY, BEST = "study.log", "best.yaml"
Report = Callable[[float, int], bool]


class Pruned(Exception):
    """A trial was given up because others were better at the same step."""


@dataclass(frozen=True, slots=True)
class Task(Generic[C]):
    """What a runner is asked to do.

    Args:
        number: of the trial, from 0.
        config: the configuration with the trial's values.
        folder: for the trial's files.
        report: tells the objective's value at a step; True says that the trial should be given up.
    """

    number: int
    config: C
    folder: Path
    report: Report


class Runner(Protocol[C]):
    """Runs one trial somewhere, and returns the objective's value."""

    def __call__(self, task: Task[C], /) -> float:
        """The value.

        Raises:
            Pruned: `report` said to give up.
            Exception: the trial failed; the search goes on.
        """
        ...


@dataclass(frozen=True, slots=True)
class TrialResult:
    """A finished trial. `state`: `complete`, `pruned` or `failed`."""

    number: int
    parameters: Mapping[str, Any]
    value: float | None
    state: str


@dataclass(frozen=True, slots=True)
class SearchResult(Generic[C]):
    """What a search found."""

    config: C
    parameters: Mapping[str, Any]
    value: float
    folder: Path
    trials: list[TrialResult]


@dataclass(kw_only=True)
class Search(Generic[C]):
    """A search over a configuration.

    Args:
        config: the configuration that trials begin with; any dataclass that `trainkit.config` reads.
        space: what is tried, by the path of a field.
        run: runs one trial.
        folder: the study, and a folder for every trial.
        direction: whether the least or the greatest value is best.
        sampler: an Optuna sampler; default TPE, from `seed`.
        pruner: an Optuna pruner; default: the median of other trials. None never gives up.
        seed: of the default sampler; a search that continues adds the number of its earlier trials.
        catch: errors of a trial that let the search go on; others end it.

    Raises:
        MissingExtra: `optuna` is not installed.
        InvalidSetup: the space is empty, or has a path that the configuration does not have.
    """

    config: C
    space: Space
    run: Runner[C]
    folder: Path | str
    direction: Literal["minimize", "maximize"] = "minimize"
    sampler: Any = None
    pruner: Any = "median"
    seed: int = 0
    catch: tuple[type[Exception], ...] = (Exception,)
    _optuna: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._optuna = require("optuna", "hyperparameter search")
        self.folder = Path(self.folder)
        if not self.space:
            raise InvalidSetup("the space is empty: give at least one field to search over")
        self._config({path: distribution.any() for path, distribution in self.space.items()})  # refuses what cannot be

    def optimize(self, n_trials: int, *, workers: int = 1) -> SearchResult[C]:
        """Runs trials until the study has `n_trials`, those of earlier lives included.

        Args:
            n_trials: of the whole study.
            workers: trials at the same time, in threads: for runners that wait for work done elsewhere.

        Raises:
            InvalidSetup: no trial was completed.
        """
        study = self._study()
        self._end_abandoned(study)
        remaining = n_trials - sum(trial.state.is_finished() for trial in study.trials)
        if remaining > 0:
            study.optimize(self._objective, n_trials=remaining, n_jobs=workers, catch=self.catch)
        return self._result(study)

    def _config(self, values: Mapping[str, Any]) -> C:
        settings = to_dict(self.config)
        for path, value in values.items():
            settings = changed(settings, path, value)
        return from_dict(settings, type(self.config))

    def _study(self) -> Any:
        optuna = self._optuna
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        backend = optuna.storages.journal.JournalFileBackend(str(folder / STUDY))
        pruner = optuna.pruners.MedianPruner() if self.pruner == "median" else self.pruner
        study = optuna.create_study(
            study_name="search",
            storage=optuna.storages.JournalStorage(backend),
            sampler=self.sampler,
            pruner=pruner or optuna.pruners.NopPruner(),
            direction=self.direction,
            load_if_exists=True,
        )
        if self.sampler is None:
            # With the same seed again, a search that continues would repeat the values of its first trials.
            study.sampler = optuna.samplers.TPESampler(seed=self.seed + len(study.get_trials(deepcopy=False)))
        return study

    def _end_abandoned(self, study: Any) -> None:
        """Trials that a killed process left are failed, and their values are tried again."""
        running = self._optuna.trial.TrialState.RUNNING
        for trial in study.get_trials(deepcopy=False, states=(running,)):
            study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)
            study.enqueue_trial(trial.params)

    def _objective(self, trial: Any) -> float:
        config = self._config({path: distribution.draw(trial, path) for path, distribution in self.space.items()})
        folder = Path(self.folder) / f"trial-{trial.number:04}"
        save(config, folder)

        def report(value: float, step: int) -> bool:
            trial.report(value, step)
            return bool(trial.should_prune())

        try:
            value = self.run(Task(trial.number, config, folder, report))
        except Pruned:
            raise self._optuna.TrialPruned from None
        log.info("trial %d: %s with %s", trial.number, value, trial.params)
        return value

    def _result(self, study: Any) -> SearchResult[C]:
        names = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
        trials = [
            TrialResult(each.number, each.params, each.value, names[each.state.name])
            for each in study.trials
            if each.state.name in names
        ]
        if not any(trial.state == "complete" for trial in trials):
            raise InvalidSetup(f"none of {len(trials)} trials was completed; look into {self.folder}")
        best = study.best_trial
        drawn = self._optuna.trial.FixedTrial(best.params)
        config = self._config({path: distribution.draw(drawn, path) for path, distribution in self.space.items()})
        save(config, self.folder, BEST)
        return SearchResult(config, best.params, best.value, Path(self.folder) / f"trial-{best.number:04}", trials)
