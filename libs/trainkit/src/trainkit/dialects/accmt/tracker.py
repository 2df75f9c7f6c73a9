"""Trackers that a script uses by itself. A `Trainer` has its own: see `log_with`, and `tracker` of a module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

from trainkit.dialects.accmt.utility import MASTER_PROCESS
from trainkit.errors import InvalidSetup
from trainkit.extras import require


class BaseTracker(ABC):
    """A tracker by its name.

    Raises:
        InvalidSetup: no name.
    """

    def __init__(self, tracker: str | None = None) -> None:
        if tracker is None:
            raise InvalidSetup("a tracker needs a name, such as 'mlflow'")
        self.name = tracker

    def get_init_kwargs(self, **kwargs: Any) -> dict[str, dict[str, Any]]:
        """The keywords by the tracker's name."""
        return {self.name: kwargs}

    @property
    @abstractmethod
    def run_id(self) -> str:
        """The id of the run that is open."""

    @abstractmethod
    def set_tracking_uri(self, uri: str) -> None:
        """Says where runs are stored."""

    @abstractmethod
    def log_artifact(self, path: str) -> None:
        """Stores a file with the run."""

    @abstractmethod
    def log_artifacts(self, path: str) -> None:
        """Stores all files below a folder with the run."""

    @abstractmethod
    def log(self, metrics: Mapping[str, Any], step: int, run_id: str | None = None) -> None:
        """Stores numbers by name."""

    @abstractmethod
    def end(self, status: Literal["FINISHED", "FAILED", "KILLED"] = "FINISHED") -> None:
        """Closes the run."""


class MLFlow(BaseTracker):
    """MLflow's own run of this process: the one that `mlflow.start_run` opened, or that the first `log` opens.

    All processes may call the methods; the first one alone writes.

    Raises:
        MissingExtra: `mlflow` is not installed.
    """

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.module: Any = require("mlflow", "accmt.tracker.MLFlow")

    @property
    def run_id(self) -> str:
        active = self.module.active_run()
        if active is None:
            raise InvalidSetup("no run of MLflow is open: call mlflow.start_run, or log first")
        return str(active.info.run_id)

    def set_tracking_uri(self, uri: str) -> None:
        if MASTER_PROCESS:
            self.module.set_tracking_uri(uri)

    def log_artifact(self, path: str) -> None:
        if MASTER_PROCESS:
            self.module.log_artifact(path)

    def log_artifacts(self, path: str) -> None:
        if MASTER_PROCESS:
            self.module.log_artifacts(path)

    def log(self, metrics: Mapping[str, Any], step: int, run_id: str | None = None) -> None:
        if MASTER_PROCESS:
            self.module.log_metrics(dict(metrics), step=step, run_id=run_id)

    def end(self, status: Literal["FINISHED", "FAILED", "KILLED"] = "FINISHED") -> None:
        if MASTER_PROCESS:
            self.module.end_run(status)
