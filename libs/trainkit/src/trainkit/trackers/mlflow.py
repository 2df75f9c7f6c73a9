"""Rows for an MLflow tracking server, or for what MLflow keeps on this machine."""

from __future__ import annotations

import json
import logging
import os
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from trainkit.errors import InvalidSetup, TrainkitError
from trainkit.extras import require
from trainkit.trackers.background import Background, LastingError, Row
from trainkit.trackers.base import Outcome, RunContext
from trainkit.trackers.plain import flat

_log = logging.getLogger("trainkit")
_STATUS: dict[Outcome, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MEMORY = "mlflow.json"  # in the run's folder: which run of the server's it is
_MOST_METRICS, _MOST_PARAMETERS, _LONGEST_VALUE = 1000, 100, 6000  # what the server takes in one request
_TOO_MANY_REQUESTS = 429
_Point: TypeAlias = tuple[str, int, str]
"""Name, step and value as text."""


class MLflow(Background):
    """One run of an MLflow experiment. A resumed run continues it: every point is there once.

    A server deletes no points, so those that the killed process stored after the checkpoint stay. A point that is
    logged again with the same name, step and value is not sent. One with another value, as after a changed setting, is
    sent, and the server has both, of which the later one is that of the resumed run.

    A run can have several: the folder remembers a run for each `uri`, `experiment` and `run_name`.

    While the server is away, rows wait and training goes on.

    Args:
        uri: `http://host:port`, a database such as `sqlite:///mlflow.db`, or None for MLflow's own default.
        experiment: its name; default the run's name.
        run_name: what the server shows; default the run's name.
        tags: to find the run by.
        artifacts: the folder of files that are stored with runs, when the experiment is new; default: MLflow's choice.
        capacity: rows that wait at most.
        interval_s: how often they are sent, in seconds.

    Raises:
        MissingExtra: when the run begins and `mlflow` is not installed.
        TrainkitError: when the run begins and the server does not answer.
    """

    def __init__(
        self,
        uri: str | None = None,
        *,
        experiment: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, str] | None = None,
        artifacts: str | Path | None = None,
        capacity: int = 100_000,
        interval_s: float = 1.0,
    ) -> None:
        super().__init__(capacity=capacity, interval_s=interval_s)
        self.uri, self.experiment, self.run_name, self.tags = uri, experiment, run_name, dict(tags or {})
        self.run_id, self.artifacts = "", artifacts
        self._client: Any = None
        self._beyond: Counter[_Point] = Counter()  # stored after the checkpoint, and not logged again yet
        self._rows: Sequence[Row] = ()
        self._points: list[Any] = []  # of these rows, and not sent yet

    @property
    def destination(self) -> str | None:
        return f"the MLflow run {self.run_id}" if self.run_id else None

    def _open(self, context: RunContext) -> None:
        # Rows are tried again here, so the client should not keep the thread for minutes, past the end of the run.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        mlflow = require("mlflow", "the MLflow tracker")
        _reach(self.uri)
        exceptions = require("mlflow.exceptions", "the MLflow tracker")
        try:
            self._begin_or_continue(mlflow.MlflowClient(self.uri), context)
        except exceptions.MlflowException as error:
            raise TrainkitError(f"MLflow at {self.uri or 'its default place'} refused the run: {error}") from error

    def _begin_or_continue(self, client: Any, context: RunContext) -> None:
        self._client = client
        memory = context.folder / _MEMORY if context.folder is not None else None
        known = json.loads(memory.read_text()) if memory is not None and memory.exists() else {}
        runs: dict[str, str] = known.get("runs", {})
        key = json.dumps([self.uri, self.experiment or context.name, self.run_name or context.name])
        if context.resumed_step is not None and (run_id := _remembered(known, runs, key)) is not None:
            self.run_id = run_id
            self._client.update_run(self.run_id, status="RUNNING")
            self._report_moved(self.experiment or context.name)
            self._beyond = Counter(self._after_checkpoint(context))
            return
        self._beyond = Counter()
        self.run_id = self._create(context)
        if memory is not None:
            memory.parent.mkdir(parents=True, exist_ok=True)
            kept = runs if key not in runs else {}  # else those of a run that began before
            memory.write_text(json.dumps({"run_id": self.run_id, "runs": {**kept, key: self.run_id}}))

    def _report_moved(self, wanted: str) -> None:
        experiment = self._client.get_run(self.run_id).info.experiment_id
        if (present := self._client.get_experiment(experiment).name) != wanted:
            _log.warning(
                "changed since the checkpoint: MLflow experiment: %s → %s; run %s continues in the former, where it "
                "began, because MLflow moves no run",
                *(present, wanted, self.run_id),
            )

    def _create(self, context: RunContext) -> str:
        name = self.experiment or context.name
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name, self._place())
        run = self._client.create_run(experiment, run_name=self.run_name or context.name, tags=self.tags)
        entities = require("mlflow.entities", "the MLflow tracker")
        items = list(flat(context.parameters).items())
        for at in range(0, len(items), _MOST_PARAMETERS):
            part = [
                entities.Param(key, str(value)[:_LONGEST_VALUE]) for key, value in items[at : at + _MOST_PARAMETERS]
            ]
            self._client.log_batch(run.info.run_id, params=part)
        return str(run.info.run_id)

    def _place(self) -> str | None:
        return None if self.artifacts is None else Path(self.artifacts).resolve().as_uri()

    def _after_checkpoint(self, context: RunContext) -> Iterator[_Point]:
        """The stored points that the resumed run logs again."""
        for name in self._client.get_run(self.run_id).data.metrics:
            for point in self._client.get_metric_history(self.run_id, name):
                if not context.keeps(point.step, point.timestamp / 1000):
                    yield _point(name, point.step, point.value)

    def _write(self, rows: Sequence[Row]) -> None:
        if rows is not self._rows:  # else it is another try, which sends the rest
            self._rows, self._points = rows, list(self._new_points(rows))
        while self._points:
            self._send(self._points[:_MOST_METRICS])
            del self._points[:_MOST_METRICS]

    def _new_points(self, rows: Sequence[Row]) -> Iterator[Any]:
        entities = require("mlflow.entities", "the MLflow tracker")
        for row in rows:
            for name, value in row.values.items():
                if self._beyond[again := _point(name, row.step, value)] > 0:
                    self._beyond[again] -= 1
                else:
                    yield entities.Metric(name, value, int(row.time * 1000), row.step)

    def _send(self, points: list[Any]) -> None:
        exceptions = require("mlflow.exceptions", "the MLflow tracker")
        try:
            self._client.log_batch(self.run_id, metrics=points)
        except exceptions.MlflowException as error:
            if 400 <= error.get_http_status_code() < 500 and error.get_http_status_code() != _TOO_MANY_REQUESTS:
                raise LastingError(str(error)) from error
            raise

    def _close(self, outcome: Outcome) -> None:
        self._client.set_terminated(self.run_id, _STATUS[outcome])

    def log_artifact(self, path: str | Path, folder: str | None = None) -> None:
        """Stores a file, or a folder with all below it, with the run. Waits until it is there.

        Raises:
            InvalidSetup: there is no such file, or the run has not begun.
        """
        if self._client is None:
            raise InvalidSetup("the run has not begun: artifacts are stored with an open run")
        if not Path(path).exists():
            raise InvalidSetup(f"there is no file {path}")
        store = self._client.log_artifacts if Path(path).is_dir() else self._client.log_artifact
        store(self.run_id, str(path), folder)


def _point(name: str, step: int, value: float) -> _Point:
    """A point, to compare it with others. MLflow stores the largest number for infinity."""
    return name, step, repr(min(max(value, -sys.float_info.max), sys.float_info.max))


def _remembered(known: Mapping[str, Any], runs: Mapping[str, str], key: str) -> str | None:
    """The run that a tracker had before. When the folder knows a single one, it is that, whatever changed."""
    run_id: str | None = runs.get(key) if key in runs or len(runs) > 1 else known.get("run_id")
    return run_id


def _reach(uri: str | None) -> None:
    if uri is None or not uri.startswith(("http://", "https://")):
        return
    try:
        urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=10).close()
    except urllib.error.HTTPError:
        return  # something answers
    except OSError as error:
        raise TrainkitError(f"the MLflow server {uri} does not answer: {error}; start it, or correct uri") from None
