"""Runs at a tracker: MLflow in a folder, and a real server of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trainkit.dialects.accmt.hp_search import HyperParameterSearch
from trainkit.dialects.accmt.running import _mlflow
from trainkit.dialects.accmt.tracker import BaseTracker, MLFlow
from trainkit.errors import Interrupted, TrainkitError

from libs.trainkit.tests.dialects.accmt.bowl import Bowl, Noted, bowls, fitted, hps, logged, trainer
from scripts.testbed.ports import free_port

# The module returns the values of a metric that the runs here do not have.
pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")


def client(place: str) -> Any:
    import mlflow

    return mlflow.MlflowClient(place)


def only_run(found: Any, name: str) -> Any:
    experiment = found.get_experiment_by_name(name)
    assert experiment is not None
    (run,) = found.search_runs([experiment.experiment_id])
    return run


@pytest.mark.spec("AC-013")
@pytest.mark.spec("AC-041")
@pytest.mark.spec("AC-042")
@pytest.mark.spec("AC-043")
@pytest.mark.spec("AC-046")
@pytest.mark.spec("AC-047")
@pytest.mark.spec("AC-X14")
@pytest.mark.spec("AC-X19")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow's own use of its database
def test_a_run_is_kept_in_a_folder_with_its_settings_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {
        "log_with": "mlflow",
        "logging_dir": str(tmp_path / "logs"),
        "run_name": "r1",
        "tags": {"k": "v"},
        "additional_tracker_config": {"note": "x"},
    }
    made = trainer(tmp_path / "digits", hps(), **options)
    with pytest.raises(ValueError, match="give the trainer log_with='mlflow'"):
        trainer(tmp_path).log_artifact(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"none\.txt"):
        made.log_artifact(tmp_path / "none.txt")
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "d.txt").write_text("d")
    (tmp_path / "before.txt").write_text("before")
    made.log_artifact(tmp_path / "before.txt")
    made.log_artifacts(tmp_path / "early")
    made.fit(Bowl(), bowls(96), bowls(32))
    (tmp_path / "one.txt").write_text("one")
    (tmp_path / "many" / "deep").mkdir(parents=True)
    for name in ("a.txt", "b.txt", "deep/c.txt"):
        (tmp_path / "many" / name).write_text(name)
    made.log_artifact(tmp_path / "one.txt")
    made.log_artifacts(tmp_path / "many")
    with pytest.raises(FileNotFoundError, match=r"none\.txt"):
        made.log_artifact(tmp_path / "none.txt")
    monkeypatch.setenv("RANK", "1")
    (tmp_path / "another.txt").write_text("of another process")
    made.log_artifact(tmp_path / "another.txt")

    assert (tmp_path / "logs" / "mlflow.db").is_file()
    found = client(f"sqlite:///{tmp_path / 'logs' / 'mlflow.db'}")
    run = only_run(found, "digits")
    assert run.info.status == "FINISHED" and run.info.run_name == "r1" and run.data.tags.get("k") == "v"
    assert {name: run.data.params.get(name) for name in ("note", "epochs", "batch_size", "lr")} == {
        "note": "x",
        "epochs": "2",
        "batch_size": "8",
        "lr": "0.1",
    }
    assert sorted(point.step for point in found.get_metric_history(run.info.run_id, "val_loss")) == [12, 24]
    assert list(logged(tmp_path / "digits", "val_loss")) == [12, 24]
    files = [each.path for each in found.list_artifacts(run.info.run_id)]
    assert sorted(files) == ["a.txt", "b.txt", "before.txt", "d.txt", "deep", "one.txt"]
    assert [each.path for each in found.list_artifacts(run.info.run_id, "deep")] == ["deep/c.txt"]
    assert Path(found.download_artifacts(run.info.run_id, "one.txt", str(tmp_path))).read_text() == "one"
    tracker = MLFlow()
    try:
        _log_without_a_trainer(tracker, tmp_path, found)
    finally:
        tracker.module.set_tracking_uri(None)


def _log_without_a_trainer(tracker: MLFlow, folder: Path, found: Any) -> None:
    """A tracker of a script's own, in the database of the run before it."""
    tracker.set_tracking_uri(f"sqlite:///{folder / 'logs' / 'mlflow.db'}")
    with pytest.raises(ValueError, match="no run of MLflow is open"):
        _ = tracker.run_id
    experiment = found.create_experiment("alone", artifact_location=(folder / "alone").as_uri())
    tracker.module.start_run(experiment_id=experiment)
    tracker.log({"loss": 0.5}, step=3)
    identity = tracker.run_id
    tracker.log_artifact(str(folder / "one.txt"))
    tracker.log_artifacts(str(folder / "many"))
    tracker.end("KILLED")
    run = found.get_run(identity)
    assert run.info.status == "KILLED"
    assert [(point.step, point.value) for point in found.get_metric_history(identity, "loss")] == [(3, 0.5)]
    files = [each.path for each in found.list_artifacts(identity)]
    assert sorted(files) == ["a.txt", "b.txt", "deep", "one.txt"]
    assert tracker.get_init_kwargs(run_name="r") == {"mlflow": {"run_name": "r"}}
    with pytest.raises(ValueError, match="needs a name"):
        BaseTracker.__init__(tracker)


@pytest.mark.spec("AC-042")
def test_a_run_shows_on_a_server(mlflow_server: Any, tmp_path: Path) -> None:
    made = trainer(tmp_path, hps(epochs=1), track_name="served", log_with="mlflow", logging_dir=mlflow_server.uri)
    made.fit(Bowl(), bowls(96))
    assert only_run(client(mlflow_server.uri), "served").info.status == "FINISHED"


@pytest.mark.spec("AC-141")
def test_trials_of_a_search_are_runs_below_its_name(mlflow_server: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"log_with": "mlflow", "logging_dir": mlflow_server.uri, "dataloader_num_workers": 0}
    searched = HyperParameterSearch(Bowl, bowls(8), bowls(8), model_path=tmp_path / "tuned", **options)
    searched.set_parameters(train_batch_size=8)
    searched.optimize(n_trials=2)
    found = client(mlflow_server.uri)
    experiment = found.get_experiment_by_name("tuned")
    assert experiment is not None
    assert {run.info.run_name for run in found.search_runs([experiment.experiment_id])} == {"trial-0000", "trial-0001"}


@pytest.mark.spec("AC-042")
def test_a_tracker_is_a_folder_an_address_or_a_url(tmp_path: Path) -> None:
    port = free_port()
    for place, uri in (
        (f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port}"),
        (f"https://tracker.example:{port}", f"https://tracker.example:{port}"),
        (f"127.0.0.1:{port}", f"http://127.0.0.1:{port}"),
        ("10.0.0.7", "http://10.0.0.7"),
        (str(tmp_path / "logs"), f"sqlite:///{tmp_path / 'logs' / 'mlflow.db'}"),
    ):
        assert _mlflow(trainer(tmp_path, log_with="mlflow", logging_dir=place)).uri == uri
    module = Bowl()
    with pytest.raises(TrainkitError, match=f"{port} does not answer"):
        fitted(tmp_path / "away", module=module, log_with="mlflow", logging_dir=f"127.0.0.1:{port}")
    assert module.seen == []


@pytest.mark.spec("AC-100")
@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), "KILLED"), (ValueError("wrong"), "FAILED"), (Interrupted(), "KILLED")]
)
def test_a_run_that_an_error_ended_is_marked(
    mlflow_server: Any, tmp_path: Path, error: BaseException, status: str
) -> None:
    class Raises(Bowl):
        def training_step(self, batch: Any) -> Any:
            raise error

    noted = Noted()
    options: dict[str, Any] = {"log_with": "mlflow", "logging_dir": mlflow_server.uri, "callback": noted}
    name = f"ended by {type(error).__name__}"
    with pytest.raises(type(error)):
        fitted(tmp_path, hps(max_steps=1), module=Raises(), val=None, track_name=name, **options)
    assert only_run(client(mlflow_server.uri), name).info.status == status
    hook = "on_exception" if status == "FAILED" else "on_keyboard_interrupt"
    assert noted.given.get(hook) == [(error,)]


@pytest.mark.spec("AC-013")
@pytest.mark.spec("AC-041")
@pytest.mark.spec("AC-043")
def test_what_no_tracker_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"log_evry.*did you mean log_every"):
        trainer(tmp_path, log_evry=3)
    with pytest.raises(ValueError, match=r"'foo'.*mlflow"):
        trainer(tmp_path, log_with="foo")
    fitted(tmp_path / "untracked", hps(max_steps=1), val=None, log_every=1)
    assert (tmp_path / "untracked" / "metrics.jsonl").is_file()
    with pytest.raises(ValueError, match="'epochs' is one of the run's own"):
        fitted(tmp_path, additional_tracker_config={"epochs": 3})
