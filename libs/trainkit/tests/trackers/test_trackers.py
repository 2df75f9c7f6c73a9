"""Trackers: what reaches the place, what is dropped, what a resume does; each with the real thing."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from trainkit import Checkpoints
from trainkit.errors import InvalidSetup, TrainkitError
from trainkit.trackers import (
    Background,
    Csv,
    JsonLines,
    LastingError,
    MLflow,
    Row,
    RunContext,
    TensorBoard,
    Tracker,
    Yard,
)
from trainkit.trackers.background import DROPPED
from trainkit.trackers.base import Outcome
from trainkit.trackers.clock import Clock

from libs.trainkit.tests.forks import Forks
from libs.trainkit.tests.slope import trainer
from libs.trainkit.tests.trackers.server import Server, wait_for
from scripts.testbed.patience import PATIENCE_S
from scripts.testbed.ports import free_port


def context(folder: Path | None, resumed_step: int | None = None) -> RunContext:
    parameters = {"optimizer": {"type": "AdamW", "lr": 1e-3}, "epochs": 3}
    return RunContext(name="digits", folder=folder, parameters=parameters, resumed_step=resumed_step)


class Gate(Background):
    """Writes only while it is open, and refuses some rows for good."""

    def __init__(self, *, capacity: int = 100, patience_s: float = PATIENCE_S) -> None:
        super().__init__(capacity=capacity, interval_s=0.001, patience_s=patience_s)
        self.rows: list[Row] = []
        self.open_gate, self.tries = threading.Event(), 0
        self.threads: set[int] = set()
        self.outcome: Outcome | None = None

    def _open(self, context: RunContext) -> None:
        pass

    def _write(self, rows: Sequence[Row]) -> None:
        self.tries += 1
        self.threads.add(threading.get_ident())
        if any("refused" in row.values for row in rows):
            raise LastingError("not wanted")
        if not self.open_gate.is_set():
            raise OSError("away")
        self.rows += rows

    def _close(self, outcome: Outcome) -> None:
        self.outcome = outcome


def steps(rows: Sequence[Row]) -> list[tuple[int, dict[str, float]]]:
    return [(row.step, dict(row.values)) for row in rows]


@pytest.mark.spec("AC-042")
def test_rows_wait_while_the_place_is_away_and_arrive_in_order() -> None:
    gate = Gate()
    gate.open(context(None))
    for step in range(20):
        gate.log({"loss": torch.tensor(step / 2)}, step)
    wait_for(lambda: gate.tries >= 2)
    assert gate.rows == []
    gate.open_gate.set()
    gate.close("finished")
    assert steps(gate.rows) == [(step, {"loss": step / 2}) for step in range(20)]
    assert gate.outcome == "finished"
    assert threading.get_ident() not in gate.threads


def test_what_finds_the_queue_full_is_dropped_and_marked_where_it_is_missing() -> None:
    gate = Gate(capacity=3)
    gate.open(context(None))
    gate.log({"loss": 0.0}, 0)
    wait_for(lambda: gate.tries)  # the thread holds the first row; the queue takes three more
    for step in range(1, 8):
        gate.log({"loss": 0.0}, step)
    gate.open_gate.set()
    wait_for(lambda: len(gate.rows) == 4)
    gate.log({"loss": 1.0}, 8)
    gate.close("finished")
    assert steps(gate.rows)[4:] == [(4, {DROPPED: 4.0}), (8, {"loss": 1.0})]


def test_rows_that_are_refused_for_good_do_not_hold_up_the_rest() -> None:
    gate = Gate()
    gate.open_gate.set()
    gate.open(context(None))
    gate.log({"refused": 1.0}, 1)
    gate.flush()
    gate.log({"loss": 1.0, "text": torch.ones(2)}, 2)  # two elements are no number
    gate.close("failed")
    assert steps(gate.rows) == [(2, {"loss": 1.0})]


def test_the_end_of_a_run_waits_no_longer_than_its_patience() -> None:
    gate = Gate(patience_s=0.05)
    gate.open(context(None))
    gate.log({"loss": 1.0}, 1)
    gate.flush()
    gate.close("stopped")
    assert gate.rows == []


def test_a_flush_returns_when_rows_are_written() -> None:
    gate = Gate()
    gate.open_gate.set()
    gate.open(context(None))
    gate.log({"loss": 1.0}, 1)
    gate.flush()
    assert len(gate.rows) == 1
    gate.close("finished")


def run_killed_at_7_and_resumed_at_5(make: Callable[[], Tracker], folder: Path) -> None:
    """Rows 0 to 7, a kill, and rows 6 to 9 of the next life."""
    first = make()
    first.open(context(folder))
    for step in range(8):
        first.log({"train/loss": step / 4} | ({"val/loss": float("nan")} if step == 5 else {}), step)
    first.flush()  # what a kill after it leaves behind
    second = make()
    second.open(context(folder, resumed_step=5))
    for step in range(6, 10):
        second.log({"train/loss": torch.tensor(step / 4)}, step)
    second.close("finished")


def test_json_lines_have_every_step_once_after_a_kill(tmp_path: Path) -> None:
    run_killed_at_7_and_resumed_at_5(JsonLines, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["train/loss"]) for row in rows] == [(step, step / 4) for step in range(10)]
    assert rows[5]["val/loss"] == "nan"


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "time": 0, "a": 1}\n{"step": 2, "ti')
    tracker = JsonLines()
    tracker.open(context(tmp_path, resumed_step=2))
    tracker.log({"a": 3}, 3)
    tracker.close("finished")
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 3]


def test_a_fresh_run_begins_a_fresh_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 0, "a": 1}\n')
    tracker = JsonLines()
    tracker.open(context(tmp_path))
    tracker.close("finished")
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_a_table_has_a_column_for_names_that_come_later(tmp_path: Path) -> None:
    run_killed_at_7_and_resumed_at_5(Csv, tmp_path)
    with open(tmp_path / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["step", "time", "train/loss", "val/loss"]
    assert [(row["step"], row["train/loss"], row["val/loss"]) for row in rows] == [
        (str(step), str(step / 4), "nan" if step == 5 else "") for step in range(10)
    ]


ON_A_FULL_DISK = """
import logging, resource, signal, sys, threading
from pathlib import Path
from trainkit.trackers import Csv, JsonLines, RunContext

told = threading.Event()

class Told(logging.StreamHandler):
    def emit(self, record):
        super().emit(record)
        told.set()

logging.getLogger("trainkit").addHandler(Told())
make = {"JsonLines": JsonLines, "Csv": Csv}[sys.argv[1]]
tracker = make(Path("rows"), interval_s=0.01)
tracker.open(RunContext(name="run", folder=None))
tracker.log({"loss": 0.0}, 0)
tracker.flush()
size = Path("rows").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for step in range(1, 21):
    tracker.log({"loss": float(step), **({"late": 1.0} if step > 10 else {})}, step)
assert told.wait(240)  # that they do not fit
tracker._patience_s = 240.0
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
tracker.close("finished")
"""


@pytest.mark.parametrize("kind", ["JsonLines", "Csv"])
def test_a_disk_that_was_full_for_a_while_costs_no_row_and_doubles_none(kind: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ON_A_FULL_DISK, kind], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "rows wait, because they could not be written" in done.stderr
    with open(tmp_path / "rows", newline="") as file:
        rows = list(csv.DictReader(file)) if kind == "Csv" else [json.loads(line) for line in file]
    assert [float(row["loss"]) for row in rows] == [float(step) for step in range(21)]
    assert [float(row["late"]) for row in rows[11:]] == [1.0] * 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows"]


@pytest.mark.parametrize("make", [JsonLines, Csv])
def test_a_tracker_that_is_opened_again_stores_the_rows_of_its_new_run(
    make: Callable[[], Tracker], tmp_path: Path
) -> None:
    tracker = make()
    for name in ("first", "second"):
        tracker.open(context(tmp_path / name))
        tracker.log({"loss": 1.0}, 1)
        tracker.close("finished")
    for name in ("first", "second"):
        (file,) = (tmp_path / name).iterdir()
        assert "loss" in file.read_text() and "1.0" in file.read_text()


@pytest.mark.parametrize("make", [JsonLines, Csv, TensorBoard])
def test_a_place_that_cannot_be_written_is_told_before_training(
    make: Callable[[Path], Tracker], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TrainkitError, match=r"file.within cannot be written: [\w ]+; give another"):
        make(tmp_path / "file" / "within").open(context(None))


def test_an_address_that_mlflow_does_not_know_is_told_before_training(tmp_path: Path) -> None:
    with pytest.raises(TrainkitError, match=r"MLflow at ftp://nowhere refused the run: .*unsupported URI"):
        MLflow("ftp://nowhere").open(context(tmp_path))


@pytest.mark.parametrize("make", [JsonLines, Csv, TensorBoard])
def test_a_run_without_a_folder_asks_for_a_path(make: Callable[[], Tracker]) -> None:
    with pytest.raises(TrainkitError, match="makes no checkpoints: give"):
        make().open(context(None))


@pytest.mark.parametrize("given", [False, True], ids=["the run's folder", "a folder of the user"])
def test_tensorboard_shows_every_step_once_when_a_run_starts_again_that_had_no_checkpoint(
    given: bool, tmp_path: Path
) -> None:
    for steps in (7, 3):
        tracker = TensorBoard(tmp_path / "tensorboard" if given else None)
        tracker.open(context(tmp_path))
        for step in range(steps):
            tracker.log({"train/loss": step / steps}, step)
        tracker.close("stopped")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("train/loss")] == [
        (step, pytest.approx(step / 3)) for step in range(3)
    ]


@pytest.mark.parametrize("make", [JsonLines, Csv, TensorBoard])
def test_two_trackers_of_one_place_are_refused(make: Any, tmp_path: Path) -> None:
    tracker = make()
    for pair in ([tracker, tracker], [make(), make()]):
        with pytest.raises(InvalidSetup, match=rf"the tracker {make.__name__} both store to {tmp_path}.*leave one out"):
            trainer(trackers=pair, checkpoints=Checkpoints(folder=tmp_path)).fit()


def test_tensorboard_shows_every_step_once_after_a_kill(tmp_path: Path) -> None:
    run_killed_at_7_and_resumed_at_5(TensorBoard, tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("train/loss")] == [
        (step, step / 4) for step in range(10)
    ]
    text = events.Tensors("parameters/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| optimizer.lr | 0.001 |" in text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("mlflow"))
    made.start()
    yield made
    made.stop()


def test_mlflow_has_every_step_once_after_a_kill_and_an_outage(server: Server, tmp_path: Path) -> None:
    run_killed_at_7_and_resumed_at_5(lambda: MLflow(server.uri, tags={"team": "vision"}), tmp_path)

    import mlflow

    client = mlflow.MlflowClient(server.uri)
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted((each.step, each.value) for each in history) == [(step, step / 4) for step in range(10)]
    assert run.info.status == "FINISHED" and run.data.tags["team"] == "vision"
    assert run.data.params == {"optimizer.type": "AdamW", "optimizer.lr": "0.001", "epochs": "3"}

    outage = MLflow(server.uri, experiment="outage")
    outage._patience_s = PATIENCE_S
    outage.open(context(tmp_path / "outage"))
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "a.txt").write_text("kept")
    outage.log_artifact(notes, "notes")
    server.stop()
    outage.log({"loss": 1.0}, 1)
    wait_for(lambda: not outage._waiting)  # the row is in the hands of the writing thread
    server.start()
    outage.close("failed")
    run = client.get_run(outage.run_id)
    assert run.data.metrics == {"loss": 1.0} and run.info.status == "FAILED"
    assert [each.path for each in client.list_artifacts(outage.run_id, "notes")] == ["notes/a.txt"]


def test_an_mlflow_run_that_was_resumed_under_another_experiment_says_that_it_stays(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    began = MLflow(server.uri, experiment="first")
    began.open(context(tmp_path))
    began.close("stopped")
    resumed = MLflow(server.uri, experiment="second")
    resumed.open(context(tmp_path, 5))
    resumed.close("finished")

    assert resumed.run_id == began.run_id
    assert "MLflow experiment: first → second" in caplog.text


def test_mlflow_has_every_point_once_when_rows_of_the_checkpoints_step_were_logged_after_it(
    server: Server, tmp_path: Path
) -> None:
    """As after a SIGTERM in an evaluation and a SIGKILL later: the evaluation of step 5 is done again."""
    first = MLflow(server.uri, experiment="twice")
    clock = Clock()
    first.open(RunContext(name="twice", folder=tmp_path, clock=clock))
    first.log({"loss": 0.5, "val/loss": 3.0}, 5)
    cut = clock.cut()
    first.log({"val/loss": 2.0}, 5)
    first.log({"loss": 0.6}, 6)
    first.flush()
    for _ in range(2):
        context = RunContext(name="twice", folder=tmp_path, resumed_step=5, resumed_time=cut, clock=Clock(cut))
        again = MLflow(server.uri, experiment="twice")
        again.open(context)
        again.log({"val/loss": 2.0}, 5)
        again.log({"loss": 0.6}, 6)
        again.close("finished")

    import mlflow

    client = mlflow.MlflowClient(server.uri)
    for name, points in {"loss": [(5, 0.5), (6, 0.6)], "val/loss": [(5, 2.0), (5, 3.0)]}.items():
        history = client.get_metric_history(again.run_id, name)
        assert sorted((each.step, each.value) for each in history) == points


def test_mlflow_has_the_values_of_a_resumed_run_whose_settings_changed(server: Server, tmp_path: Path) -> None:
    first = MLflow(server.uri, experiment="changed")
    clock = Clock()
    first.open(RunContext(name="changed", folder=tmp_path, clock=clock))
    cut = clock.cut()
    first.log({"loss": 1.0, "same": math.inf}, 6)
    first.flush()
    again = MLflow(server.uri, experiment="changed")
    again.open(RunContext(name="changed", folder=tmp_path, resumed_step=5, resumed_time=cut, clock=Clock(cut)))
    again.log({"loss": 0.25, "same": math.inf}, 6)
    again.close("finished")

    import mlflow

    client = mlflow.MlflowClient(server.uri)
    assert client.get_run(again.run_id).data.metrics["loss"] == 0.25
    assert len(client.get_metric_history(again.run_id, "same")) == 1


def test_two_mlflow_trackers_of_a_run_continue_their_own(server: Server, tmp_path: Path) -> None:
    def pair() -> list[MLflow]:
        return [MLflow(server.uri, experiment=name) for name in ("one", "other")]

    began, resumed = pair(), pair()
    for tracker in began:
        tracker.open(context(tmp_path))
        tracker.close("stopped")
    for tracker in reversed(resumed):
        tracker.open(context(tmp_path, 5))
        tracker.close("finished")

    assert [tracker.run_id for tracker in resumed] == [tracker.run_id for tracker in began]
    assert began[0].run_id != began[1].run_id


def test_an_mlflow_server_that_is_not_there_is_told_before_training(tmp_path: Path) -> None:
    with pytest.raises(TrainkitError, match="does not answer"):
        MLflow(f"http://127.0.0.1:{free_port()}").open(context(tmp_path))


def test_the_yard_gets_rows_and_parameters(tmp_path: Path) -> None:
    program = """
from trainkit.trackers import RunContext, Yard
import torch
yard = Yard()
yard.open(RunContext(name="digits", folder=None, parameters={"optimizer": {"lr": 0.1}}))
yard.log({"train/loss": torch.tensor(0.5)}, 3)
yard.flush()
yard.close("finished")
"""
    environment = {**os.environ, "TRAINYARD_TRACKER_DIR": str(tmp_path), "TRAINYARD_HOME": str(tmp_path / "home")}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
    stored = b"".join(path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file())
    assert b"train/loss" in stored and b"optimizer.lr" in stored


def fit_twice(folder: str) -> None:
    """A script that has a run of its own around one fit, and none around the next."""
    from trainyard import tracker

    os.environ["TRAINYARD_HOME"] = folder
    os.environ.pop("TRAINYARD_TRACKER_DIR", None)
    tracker.init("mine", params={"seed": 7})
    for name in ("digits", "words"):
        yard = Yard()
        yard.open(RunContext(name=name, folder=None, parameters={"lr": 0.1}))
        yard.log({f"train/{name}": 0.5}, 3)
        yard.close("finished")
        tracker.log({f"test/{name}": 0.9}, step=4)
        tracker.finish()


def test_a_script_that_began_a_run_of_the_yard_keeps_it_over_a_fit(tmp_path: Path, forks: Forks) -> None:
    forks.succeed(fit_twice, tmp_path)
    runs = {json.loads(path.read_bytes())["name"]: path.parent for path in tmp_path.glob("offline/*/run.json")}
    assert set(runs) == {"mine", "words"}
    stored = b"".join(path.read_bytes() for path in runs["mine"].rglob("*") if path.is_file())
    assert all(text in stored for text in (b"seed", b"lr", b"train/digits", b"test/digits"))
