"""Checkpoints, and going on from them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trainkit.dialects.accmt.checks import checkpoint_every
from trainkit.dialects.accmt.resuming import indices
from trainkit.durations import Epochs, Evaluations
from trainkit.errors import WrongCheckpoint

from libs.trainkit.tests.dialects.accmt.bowl import (
    Bowl,
    Noted,
    Numbers,
    Ordered,
    Stop,
    StopsAt,
    fitted,
    hps,
    logged,
    trainer,
)

# The module returns the values of a metric that most runs here do not have.
pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")


@pytest.mark.spec("AC-057")
@pytest.mark.spec("AC-058")
@pytest.mark.spec("AC-059")
@pytest.mark.spec("AC-060")
def test_checkpoints_are_made_and_kept_as_asked(tmp_path: Path) -> None:
    for at, off in enumerate(({"enable_checkpointing": False}, {"checkpoint_every": None})):
        made, _ = fitted(tmp_path / f"off-{at}", **off)
        assert made.state.num_checkpoints_made == 0 and not (tmp_path / f"off-{at}" / "checkpoints").exists()
    cases: list[tuple[dict[str, Any], dict[int, int]]] = [
        ({}, {3: 20}),
        ({"multiple_checkpoints": True}, {0: 5, 1: 10, 2: 15, 3: 20}),
        ({"multiple_checkpoints": True, "max_checkpoints": 2}, {2: 15, 3: 20}),
    ]
    for at, (options, kept) in enumerate(cases):
        fitted(tmp_path / str(at), checkpoint_every="5st", **options)
        found = indices(tmp_path / str(at) / "checkpoints")
        assert {index: int(path.name.removeprefix("step-")) for index, path in found.items()} == kept

    def refusal(text: str) -> str:
        try:
            trainer(tmp_path, checkpoint_every=text)
        except ValueError as error:
            return str(error)
        return ""

    for text in ("epoch", "ep", "1epoch", "1ep", "1 ep", "2eps", "3steps", "3st", "4 evals", "2EPS", "1Evaluation"):
        assert refusal(text) == ""
    for text in ("2 hours", "0ep", "-1ep", "1.5ep", "3up", "8 samples"):
        assert text in refusal(text)
    assert checkpoint_every("epoch") == Epochs(1) and checkpoint_every("2 evals") == Evaluations(2)
    with pytest.raises(ValueError, match="needs validation data"):
        fitted(tmp_path / "eval", val=None, checkpoint_every="1eval")
    noted = Noted()
    made, _ = fitted(tmp_path / "evals", hps(epochs=4), checkpoint_every="2 evals", callback=noted)
    assert made.state.num_checkpoints_made == 2
    order = [call for call in noted.calls if call in ("on_evaluation_end", "on_save_checkpoint")]
    assert order == ["on_evaluation_end", "on_evaluation_end", "on_save_checkpoint"] * 2
    for wrong in ({"max_checkpoints": 0, "multiple_checkpoints": True}, {"max_checkpoints": 2}):
        with pytest.raises(ValueError, match="max_checkpoints"):
            trainer(tmp_path, **wrong)


@pytest.mark.spec("AC-061")
def test_a_run_that_was_cut_off_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint_every": "5st", "multiple_checkpoints": True, "log_every": 1}
    numbers = hps(optim_kwargs={"lr": 0.01, "momentum": 0.9})
    _, whole = fitted(tmp_path / "whole", numbers, module=Ordered(), train=Numbers(), **options)
    with pytest.raises(Stop):
        fitted(tmp_path / "cut", numbers, module=Ordered(), train=Numbers(), callback=StopsAt(17), **options)
    noted = Noted()
    made, rest = fitted(tmp_path / "cut", numbers, module=Ordered(), train=Numbers(), callback=noted, **options)
    assert rest.seen[0][2] == 15 and made.state.global_step == 24
    assert rest.w == whole.w and rest.order == whole.order[15 * 8 :]
    for name in ("train_loss", "val_loss", "epoch"):
        assert logged(tmp_path / "cut", name) == logged(tmp_path / "whole", name)
    assert noted.calls.count("on_resume") == 1 and made.state.num_checkpoints_made == 4

    made, module = fitted(tmp_path / "cut", numbers, module=Ordered(), train=Numbers(), resume=1, **options)
    assert module.seen[0][2] == 10 and module.w == whole.w
    for resume, start in ((0, 5), (-1, 20), (True, 20)):
        part = tmp_path / f"from {resume}"
        shutil.copytree(tmp_path / "cut", part)
        _, module = fitted(part, numbers, module=Ordered(), train=Numbers(), resume=resume, **options)
        assert module.seen[0][2] == start
    for resume in (0, -1):
        with pytest.raises(ValueError, match="multiple_checkpoints=True"):
            trainer(tmp_path, resume=resume)
    made, module = fitted(tmp_path / "cut", numbers, module=Ordered(), train=Numbers(), resume=False, **options)
    assert module.seen[0][2] == 0 and (tmp_path / "cut" / "checkpoints-1").is_dir()
    with pytest.raises(IndexError, match="7"):
        fitted(tmp_path / "cut", numbers, resume=7, **options)
    with pytest.raises(FileNotFoundError):
        fitted(tmp_path / "nothing", resume=True)


@pytest.mark.spec("AC-063")
def test_a_finished_run_goes_on_only_for_more_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fitted(tmp_path)
    _, module = fitted(tmp_path)
    assert module.seen == []
    assert capsys.readouterr().err.endswith(": nothing to train: the run reached 2ep at step 24\n")
    made, module = fitted(tmp_path, hps(epochs=3))
    assert len(module.seen) == 12 and made.state.global_step == 36


def rows_of(place: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    return [{**row, "time": 0} for row in rows]


def test_running_a_finished_run_again_doubles_no_row(tmp_path: Path) -> None:
    """Its last evaluation comes after its last checkpoint, at the same step."""
    options: dict[str, Any] = {"evaluate_every_n_steps": 5, "monitor": {"checkpoint": True}, "log_every": 1}
    fitted(tmp_path, **options)
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows if "val_loss" in row] == [5, 10, 15, 20, 24]
    for _ in range(2):
        fitted(tmp_path, **options)
        assert rows_of(tmp_path) == rows


def killed_in_its_third_write(folder: str) -> None:
    from trainkit.checkpoints import saver

    writes: list[int] = []
    commit = saver.folders.commit

    def third(*given: Any) -> Any:
        writes.append(1)
        if len(writes) == 3:
            os.kill(os.getpid(), signal.SIGKILL)  # its files are written, and not yet put in the place of the others
        return commit(*given)

    saver.folders.commit = third  # type: ignore[assignment]
    fitted(Path(folder) / "run", checkpoint_every="5st")


@pytest.mark.spec("AC-059")
def test_a_kill_while_the_only_checkpoint_is_replaced_leaves_the_one_before(tmp_path: Path, forks: Any) -> None:
    assert forks.run(killed_in_its_third_write, tmp_path) == [-signal.SIGKILL]
    assert [path.name for path in indices(tmp_path / "run" / "checkpoints").values()] == ["step-10"]
    made, module = fitted(tmp_path / "run", checkpoint_every="5st")
    assert module.seen[0][2] == 10 and made.state.global_step == 24
    assert module.w == pytest.approx(1.990555, abs=1e-5)
    assert len(indices(tmp_path / "run" / "checkpoints")) == 1


class Noisy(Ordered):
    """Draws random numbers from everywhere."""

    def training_step(self, batch: Any) -> Tensor:
        noise = torch.rand(()) + random.random() + float(np.random.rand())
        return super().training_step(batch) * (1 + 0.1 * noise)


class Last(Noted):
    """Keeps the optimizer at hand."""

    optimizer: Any = None

    def on_after_optimizer_step(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def momentum(self) -> Tensor:
        return next(iter(self.optimizer.state.values()))["momentum_buffer"]


def with_all_that_is_kept(place: Path, checkpoint_every: str) -> tuple[Any, Tensor, list[dict[str, Any]]]:
    """A run with momentum, a schedule, and means of five steps logged: the module, its momentum, and the series."""
    numbers = hps(
        optim_kwargs={"lr": 0.01, "momentum": 0.9},
        scheduler="LinearWithWarmup",
        scheduler_kwargs={"num_warmup_steps": 4},
    )
    options: dict[str, Any] = {"log_every": 5, "multiple_checkpoints": True, "disable_model_saving": True}
    last = Last()
    _, module = fitted(
        place, numbers, module=Noisy(), train=Numbers(), callback=last, checkpoint_every=checkpoint_every, **options
    )
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    return module, last.momentum(), [{**row, "time": 0} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Tensor, list[dict[str, Any]]]:
    place = tmp_path_factory.mktemp("whole")
    return place, *with_all_that_is_kept(place, "1st")


NEXT_TO_AN_END = (1, 12, 13, 23)
STEPS = [pytest.param(at, marks=[] if at in NEXT_TO_AN_END else pytest.mark.exhaustive) for at in range(1, 24)]


@pytest.mark.spec("AC-062")
@pytest.mark.parametrize("step", STEPS)
def test_a_run_may_stop_after_any_step_and_ends_with_the_same_bits(whole: Any, tmp_path: Path, step: int) -> None:
    place, module, momentum, series = whole
    shutil.copytree(place / "checkpoints" / f"step-{step}", tmp_path / "checkpoints" / f"step-{step}")
    shutil.copy(place / "metrics.jsonl", tmp_path)  # also what came after the checkpoint
    rest, again, found = with_all_that_is_kept(tmp_path, "epoch")
    assert rest.seen[0][2] == step and rest.order == module.order[step * 8 :]
    assert torch.equal(rest.model.w, module.model.w) and torch.equal(again, momentum)
    assert found == series


@pytest.mark.spec("AC-062")
def test_other_epochs_and_another_rate_are_reported_and_another_batch_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fitted(tmp_path, hps(optim_kwargs={"lr": 0.1}))
    caplog.clear()
    _, module = fitted(tmp_path, hps(epochs=3, optim_kwargs={"lr": 0.05}))
    assert module.w == pytest.approx(2 - 2 * 0.8**24 * 0.9**12)
    lines = [record.getMessage().removeprefix("changed since the checkpoint: ") for record in caplog.records]
    assert lines == ["max_duration: 2ep → 3ep", "lr: 0.1 → 0.05"]
    with pytest.raises(
        WrongCheckpoint, match=r"batch_size=8 in the checkpoint and 4.*on_change=\{'batch_size': 'accept'"
    ):
        fitted(tmp_path, hps(epochs=4, batch_size=4))
    _, module = fitted(tmp_path, hps(epochs=4, batch_size=4), on_change={"batch_size": "accept"})
    assert len(module.seen) == 24


@pytest.mark.spec("AC-062")
def test_a_checkpoint_of_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    fitted(tmp_path, hps(epochs=1))
    wider = Bowl()
    wider.model.w = torch.nn.Parameter(torch.zeros(2))
    refused = (WrongCheckpoint, RuntimeError, ValueError)
    for problem, numbers, module in (
        (r"/model/model\.w has shape \(\), here it is \(2,\): it belongs to another model", hps(), wider),
        ("has the state of SGD and this run has Adam: go on with SGD", hps(optimizer="Adam"), Bowl()),
    ):
        with pytest.raises(refused, match=problem):
            fitted(tmp_path, numbers, module=module, val=None)


def on_two(folder: str) -> None:
    made, _ = fitted(Path(folder).parent / "one", hps(epochs=3))
    assert made.state.global_step == 24 + 6


@pytest.mark.spec("AC-062")
def test_another_number_of_processes_resumes_with_as_many_samples_on_each(tmp_path: Path, forks: Any) -> None:
    fitted(tmp_path / "one")
    forks.succeed(on_two, tmp_path / "two", processes=2)
    assert "the checkpoint is of 1 processes and there are 2" in (tmp_path / "two" / "rank-0.log").read_text()
