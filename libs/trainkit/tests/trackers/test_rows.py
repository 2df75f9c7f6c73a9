"""Rows as they were logged, once each: whatever changes the values afterwards, and wherever a run is ended."""

from __future__ import annotations

import csv
import json
import logging
import os
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainkit import Callback, Checkpoints, Trainer
from trainkit.checkpoints import folder as folders
from trainkit.data import Loader
from trainkit.dialects.accmt.monitor import Monitor
from trainkit.dialects.accmt.series import Series
from trainkit.errors import Interrupted
from trainkit.loop.fit import Fit
from trainkit.trackers import Csv, JsonLines, RunContext, TensorBoard, Tracker, Yard
from trainkit.trackers.clock import Clock

INTERRUPTED = 75


class Held(Tracker):
    """Keeps what it was given, as a slow tracker does."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, Mapping[str, Any]]] = []

    def open(self, context: RunContext) -> None:
        pass

    def log(self, values: Mapping[str, float | Tensor], step: int) -> None:
        self.rows.append((step, values))

    def close(self, outcome: str) -> None:
        pass


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Any) -> Tensor:
        return ((self.layer(batch[0]) - 1) ** 2).mean()


def fitted(callbacks: list[Callback], trackers: list[Tracker], **options: Any) -> Fit:
    data = TensorDataset(torch.linspace(0, 1, 16)[:, None])
    settings: dict[str, Any] = {"max_duration": "1ep", "log_every": None, **options}
    return Trainer(
        module=Line(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        train=Loader(data, batch_size=4),
        callbacks=callbacks,
        trackers=trackers,
        **settings,
    ).fit()


class Changing(Callback):
    """Logs one tensor, one array and one mapping of its own again and again, and changes them in between."""

    def __init__(self) -> None:
        self.tensor, self.array, self.list = torch.zeros(()), np.zeros(1), [0.0]
        self.row: dict[str, Any] = {"tensor": self.tensor, "array": self.array, "list": self.list, "step": 0}

    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        self.tensor += 1
        self.array += 1
        self.list[0] += 1
        self.row["step"] = fit.state.step
        fit.log(self.row)


def test_a_row_has_the_values_that_it_was_logged_with() -> None:
    first, second = Held(), Held()
    series = Series([second], Monitor(), train_loss="train_loss", val_loss="val_loss", sets=[])
    fitted([Changing()], [first, series])
    wanted = [(step, {"tensor": step, "array": step, "list": [step], "step": step}) for step in range(1, 5)]
    assert first.rows == second.rows == wanted


class Odd(Callback):
    """Logs what is no number, and what cannot even be copied."""

    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        weight = next(fit.module.parameters())
        fit.log({"graph": [weight * 2], "generator": (each for each in ()), "gradient": weight.sum() * 0 + 3})


def test_what_is_no_number_loses_its_value_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fitted([Odd()], [JsonLines(tmp_path / "rows")], max_duration="1st")

    assert json.loads((tmp_path / "rows").read_text())["gradient"] == 3
    assert "graph of step 1 is no number" in caplog.text and "generator of step 1 is no number" in caplog.text


def test_what_is_logged_to_a_queue_directly_is_copied_too(tmp_path: Path) -> None:
    tracker, value = JsonLines(tmp_path / "rows", interval_s=60), torch.zeros(())
    tracker.open(RunContext(name="run", folder=None))
    for step in range(3):
        tracker.log({"value": value.fill_(step)}, step)
    tracker.close("finished")
    assert [json.loads(line)["value"] for line in (tmp_path / "rows").read_text().splitlines()] == [0, 1, 2]


def test_the_dialect_copies_what_it_sends_at_the_end_of_a_step() -> None:
    from trainkit.dialects.accmt import progress

    array = np.zeros(1)
    kept = progress._scalar("value", array)
    array += 1
    assert kept == 0.0


class Outside(Callback):
    """Logs before the trackers are open, and after they are closed."""

    fit: Fit

    def on_fit_start(self, fit: Fit) -> None:
        self.fit = fit
        fit.log({"begin": 1.0})


def test_a_row_before_the_first_step_counts_and_one_after_the_end_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    held, outside = Held(), Outside()
    fitted([outside], [held])
    assert held.rows == [(0, {"begin": 1.0})]
    with caplog.at_level(logging.WARNING, "trainkit"):
        outside.fit.log({"end": 2.0})
        outside.fit.log({"end": 2.0})
    (said,) = [record.getMessage() for record in caplog.records]
    assert "end of step 4 was logged after the end of the run" in said


class Ending(Callback):
    """Sends this process a signal in the evaluation of a step, or after so many steps."""

    def __init__(self, number: int, step: int, within_evaluation: bool) -> None:
        self._number, self._step, self._within = number, step, within_evaluation

    def on_evaluation_step_start(self, fit: Fit, name: str, batch: Any) -> None:
        if self._within and fit.state.step == self._step:
            os.kill(os.getpid(), self._number)

    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        if not self._within and fit.state.step == self._step:
            fit._trackers.flush()  # the worst case: all rows are stored
            os.kill(os.getpid(), self._number)


class Norms(Callback):
    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        fit.log({"loss": loss})


def run(folder: str, signals: list[Any] | None = None) -> None:
    """One process of a run of 8 steps, with a checkpoint and an evaluation every 4."""
    place, ending = Path(folder), [Ending(*signals)] if signals else []
    torch.manual_seed(1)
    try:
        fitted(
            [Outside(), Norms(), *ending],
            [JsonLines(), Csv(), TensorBoard()],
            max_duration="2ep",
            log_every="2st",
            evaluate=Loader(TensorDataset(torch.linspace(0, 1, 8)[:, None]), batch_size=4, shuffle=False),
            checkpoints=Checkpoints(folder=place / "run"),
        )
    except Interrupted as end:
        raise SystemExit(INTERRUPTED) from end


def stored(folder: Path) -> dict[str, list[Any]]:
    """What each tracker has: the rows, or the points of each name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open(folder / "run" / "metrics.csv", newline="") as file:
        table = [{key: value for key, value in row.items() if key != "time"} for row in csv.DictReader(file)]
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(folder / "run" / "tensorboard"))
    events.Reload()
    names = ["begin", "loss", "train/loss", "val/loss"]
    points = {name: [(each.step, each.value) for each in events.Scalars(name)] for name in names}
    return {
        "csv": table,
        "lines": [{key: value for key, value in row.items() if key != "time"} for row in lines],
        "tensorboard": list(points.items()),
    }


def test_files_and_tensorboard_have_each_row_once_after_a_sigterm_in_an_evaluation_and_a_sigkill(
    tmp_path: Path, forks: Any
) -> None:
    forks.succeed(run, tmp_path / "whole")

    cut = tmp_path / "cut"
    assert forks.run(run, cut, signals=[signal.SIGTERM, 4, True]) == [INTERRUPTED]
    assert forks.run(run, cut, signals=[signal.SIGKILL, 6, False]) == [-signal.SIGKILL]
    (cut / "run" / "step-4").stat()  # the evaluation of step 4 was logged after this checkpoint, and is logged again
    forks.succeed(run, cut)

    whole, rows = stored(tmp_path / "whole"), stored(cut)
    assert len(whole["lines"]) == 1 + 8 + 4 + 2
    for tracker, wanted in whole.items():
        assert rows[tracker] == wanted, tracker


def test_times_tell_rows_of_a_checkpoint_from_later_ones_whatever_the_clock_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([1000.0, 1000.0, 1000.0, 990.0])
    monkeypatch.setattr("trainkit.trackers.clock.time.time", lambda: next(times))
    clock = Clock()
    before, cut = clock.now(), clock.cut()
    assert round(before, 3) < cut < int(clock.now() * 1000) / 1000
    resumed = Clock(cut)  # on a machine whose clock is behind
    assert cut < round(resumed.now(), 3)


def with_the_yard(folder: str) -> None:
    """The checkpoint of step 4 is not committed before step 6 was logged."""
    os.environ["TRAINYARD_TRACKER_DIR"] = str(Path(folder) / "tracked")
    commit, logged = folders.commit, __import__("threading").Event()

    class Reached(Callback):
        def on_step_end(self, fit: Fit, loss: Tensor) -> None:
            if fit.state.step == 7:
                logged.set()

    def late(*given: Any) -> Path:
        assert logged.wait(240)
        return commit(*given)

    folders.commit = late  # type: ignore[assignment]
    policy = Checkpoints(folder=Path(folder) / "run", every="4st", at_end=False)
    fitted([Norms(), Reached()], [Yard()], max_duration="8st", checkpoints=policy)


def test_the_yard_ends_the_rows_of_a_checkpoint_where_its_state_was_taken(tmp_path: Path, forks: Any) -> None:
    from trainyard.agent.formats import changed_ns
    from trainyard.agent.tracked import Tracked
    from trainyard.copies import signature

    forks.succeed(with_the_yard, tmp_path)

    cut = Tracked(tmp_path / "tracked").cut(changed_ns(signature(tmp_path / "run" / "step-4")), 4)
    assert list(cut.positions.values()) == [4]
