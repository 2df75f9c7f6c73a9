"""What trackers get, under the dialect's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from trainkit.dialects.accmt import artifacts
from trainkit.dialects.accmt.monitor import Monitor
from trainkit.loop.tracking import Trackers
from trainkit.trackers import MLflow
from trainkit.trackers.base import Outcome, RunContext, Tracker


class Series(Tracker):
    """Renames trainkit's series, leaves out what the monitor switches off, and passes on to other trackers.

    Args:
        trackers: where rows go.
        monitor: the switches.
        train_loss, val_loss: names of the two losses.
        sets: the validation datasets; with several, names end in `_<dataset>`.
        files: files and folders that are stored when the run opens.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        monitor: Monitor,
        *,
        train_loss: str,
        val_loss: str,
        sets: Sequence[str],
        files: Sequence[Path] = (),
    ) -> None:
        self._trackers, self._monitor, self._sets, self._files = trackers, monitor, sets, files
        self._train_loss, self._val_loss = train_loss, val_loss
        self._opened = Trackers()

    @property
    def run_id(self) -> str | None:
        """The id of the run at MLflow; None without that tracker."""
        found = self._mlflow()
        return found.run_id if found is not None else None

    def log_artifact(self, path: str | Path) -> None:
        """Stores a file with the run, from the first process; see `Trainer.log_artifact`."""
        artifacts.store(self._mlflow(), path, folder=False)

    def log_artifacts(self, path: str | Path) -> None:
        """Stores all files below a folder with the run, from the first process; see `Trainer.log_artifacts`."""
        artifacts.store(self._mlflow(), path, folder=True)

    def _mlflow(self) -> MLflow | None:
        return next((each for each in self._trackers if isinstance(each, MLflow)), None)

    def open(self, context: RunContext) -> None:
        self._opened.open(self._trackers, context)
        for path in self._files:
            artifacts.store(self._mlflow(), path, folder=path.is_dir())

    def log(self, values: Mapping[str, float | Tensor], step: int, run_id: str | None = None) -> None:
        """One row of this run, whatever `run_id` says. On processes other than the first, nothing is open and nothing
        happens."""
        named = {name: value for old, value in values.items() if (name := self.name(old)) is not None}
        if named:
            self._opened.log(named, step)

    def progress(self, step: int, total_steps: int | None) -> None:
        self._opened.progress(step, total_steps)

    def flush(self) -> None:
        self._opened.flush()

    def close(self, outcome: Outcome) -> None:
        self._opened.close(outcome)

    def name(self, old: str) -> str | None:
        """The dialect's name of a series; None when it is switched off."""
        if old == "train/loss":
            return self._train_loss if self._monitor.train_loss else None
        dataset, _, rest = old.partition("/")
        if not rest or dataset not in self._sets:
            return old
        suffix = f"_{dataset}" if len(self._sets) > 1 else ""
        if rest == "loss":
            return self._val_loss + suffix if self._monitor.validation_loss else None
        return rest.partition("/")[2] + suffix if self._monitor.additional_metrics else None
