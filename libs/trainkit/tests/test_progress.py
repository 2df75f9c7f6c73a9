"""The progress that trackers receive: the total is known from the first report on, and the run ends at it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from trainkit import Callback, Checkpoints
from trainkit.callbacks import EarlyStopping
from trainkit.data import Loader
from trainkit.durations import duration
from trainkit.loop.fit import Fit
from trainkit.loop.length import total_steps
from trainkit.module import Loss
from trainkit.state import State

from libs.trainkit.tests.slope import Slope, Written, ones, trainer


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(12))


class Counting(Slope):
    def training_step(self, batch: list[Tensor]) -> Any:
        return Loss(super().training_step(batch) * len(batch[0]), len(batch[0]))


class Interrupt(Callback):
    def __init__(self, at: int) -> None:
        self._at = at

    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        if fit.state.step == self._at:
            raise RuntimeError("the power went")


def told(**options: Any) -> tuple[list[tuple[int, int | None]], int]:
    """The progress that trackers received, and the step at which the run ended."""
    tracker = Written()
    fit = trainer(trackers=[tracker], **options).fit()
    return tracker.far, fit.state.step


@pytest.mark.parametrize("accumulate", [1, 5])
@pytest.mark.parametrize("length", ["1ep", "3ep", "7st", "30st", "1up", "7up", "8up", "50sa", "96sa", "97sa", "250sa"])
@pytest.mark.parametrize("drop_last", [True, False])
def test_the_total_is_the_step_at_which_the_run_ends(length: str, accumulate: int, drop_last: bool) -> None:
    loader = Loader(ones(99), batch_size=8, drop_last=drop_last)
    log_every = None if drop_last else "5st"
    far, end = told(train=loader, max_duration=length, accumulate=accumulate, log_every=log_every)
    assert {total for _, total in far} == {end}
    assert far[0] == (0, end)
    assert far[-1] == (end, end)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("length", ["3ep", "30st", "20up", "250sa"])
def test_a_resumed_run_reports_where_it_is_and_the_same_total(tmp_path: Path, length: str, accumulate: int) -> None:
    options: dict[str, Any] = {
        "max_duration": length,
        "accumulate": accumulate,
        "checkpoints": Checkpoints(folder=tmp_path, every=f"{4 * accumulate}st"),
    }
    with pytest.raises(RuntimeError):
        trainer(callbacks=[Interrupt(18)], **options).fit()
    far, end = told(**options)
    assert far[0] == (16, end)
    assert {total for _, total in far} == {end}


@pytest.mark.parametrize("length", ["60tok", "2ev"])
def test_a_length_that_no_step_says_gives_no_total(length: str) -> None:
    far, end = told(module=Counting(), max_duration=length, evaluate=Loader(ones(8), 8), evaluate_every="4st")
    assert far[-1] == (end, end)
    assert {total for _, total in far[:-1]} == {None}


@pytest.mark.parametrize(("length", "total"), [("2ep", None), ("4up", 4), ("5st", 5), ("20sa", None)])
def test_a_stream_without_a_length_has_a_total_only_where_the_duration_says_it(length: str, total: int | None) -> None:
    far, end = told(train=DataLoader(Stream(), batch_size=4), max_duration=length)
    assert far[0] == (0, total)
    assert total in (None, end)


def test_an_epoch_of_another_length_corrects_the_total() -> None:
    def shorter_each_time(epoch: int, generator: torch.Generator) -> range:
        return range(96 - 32 * epoch)

    far, end = told(train=Loader(ones(96), 8, order=shorter_each_time), max_duration="2ep")
    assert (far[0], far[-1], end) == ((0, 24), (20, 20), 20)


def test_a_run_that_is_stopped_early_keeps_its_total() -> None:
    stopping = EarlyStopping("val/loss", patience=1, min_delta=10.0)
    far, end = told(evaluate=Loader(ones(8), 8), evaluate_every="2st", callbacks=[stopping])
    assert end < 24
    assert far[-1] == (end, 24)


def test_the_data_is_asked_for_no_other_epoch_than_the_present_one() -> None:
    asked = []

    def in_order(epoch: int, generator: torch.Generator) -> range:
        asked.append(epoch)
        return range(96)

    told(train=Loader(ones(96), 8, order=in_order), max_duration="3ep")
    assert asked == [0, 1, 2]


def test_a_run_that_has_reached_its_end_asks_for_nothing() -> None:
    state = State(step=24, epoch=2)
    loader = Loader(ones(96), 8, order=lambda epoch, generator: pytest.fail(f"asked for epoch {epoch}"))
    assert total_steps(loader, duration("2ep"), state, accumulate=1) == 24
