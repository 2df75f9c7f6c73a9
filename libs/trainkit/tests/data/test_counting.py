"""What is counted of data: samples exactly, also of short batches and on several processes; and when an epoch ends."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainkit import Callback, Checkpoints
from trainkit.data import Loader
from trainkit.data.counted import leading
from trainkit.errors import InvalidData, TrainkitError
from trainkit.loop.fit import Fit
from trainkit.trainer import Totals

from libs.trainkit.tests.slope import Slope, Written, ones, trainer

Batches = Callable[[], list[list[Tensor]]]


def sizes(*rows: int) -> list[list[Tensor]]:
    return [[torch.ones(each)] for each in rows]


class Stream:
    """Batches without a length."""

    def __init__(self, *rows: int) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter(sizes(*self._rows))


class Counts(Callback):
    """Samples counted after each step."""

    def __init__(self, die_after: int | None = None) -> None:
        self.samples: list[int] = []
        self._die_after = die_after

    def on_step_start(self, fit: Fit, batch: Any) -> None:
        if fit.state.step == self._die_after:
            raise KeyboardInterrupt

    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        self.samples.append(fit.state.samples)


def counted(train: Any, **options: Any) -> list[int]:
    counts = Counts()
    trainer(train=train, callbacks=[counts], log_every=None, **{"max_duration": "2ep", **options}).fit()
    return counts.samples


SHORT: dict[str, Callable[[], Any]] = {
    "loader": lambda: Loader(ones(11), 4),
    "torch's loader": lambda: DataLoader(ones(11), 4, shuffle=True),
    "batches": lambda: sizes(4, 4, 3),
    "stream": lambda: Stream(4, 4, 3),
}


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_samples_are_counted_exactly_when_the_last_batch_is_short(name: str, accumulate: int) -> None:
    assert counted(SHORT[name](), accumulate=accumulate) == [4, 8, 11, 15, 19, 22]


@pytest.mark.parametrize(("length", "end"), [("11sa", 11), ("12sa", 15), ("19sa", 19), ("20sa", 22), ("22sa", 22)])
@pytest.mark.parametrize("name", SHORT)
def test_a_duration_in_samples_ends_where_it_is_reached(name: str, length: str, end: int) -> None:
    assert counted(SHORT[name](), max_duration=length)[-1] == end


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("length", ["8sa", "22sa", "33sa", "34sa", "60sa"])
def test_a_schedule_knows_the_updates_of_a_run_in_samples(length: str, accumulate: int, drop_last: bool) -> None:
    told: list[int] = []

    def schedule(optimizer: torch.optim.Optimizer, totals: Totals) -> Any:
        told.append(totals.updates)
        return torch.optim.lr_scheduler.ConstantLR(optimizer)

    loader = Loader(ones(11), 4, drop_last=drop_last)
    fit = trainer(train=loader, max_duration=length, accumulate=accumulate, schedule=schedule).fit()

    assert told == [fit.state.update]


@pytest.mark.parametrize("name", SHORT)
def test_a_cadence_in_samples_is_due_when_they_were_trained_on_also_after_a_restart(name: str, tmp_path: Path) -> None:
    def rows(place: Path, die_after: int | None = None, **options: Any) -> list[int]:
        written = Written()
        options |= {"checkpoints": Checkpoints(folder=place, every="4st"), "callbacks": [Counts(die_after)]}
        try:
            trainer(train=SHORT[name](), trackers=[written], log_every="5sa", max_duration="4ep", **options).fit()
        except KeyboardInterrupt:
            assert die_after
        return [step for step, _ in written.rows]

    # after 4 8 11 | 15 19 22 | 26 30 33 | 37 41 44 samples
    assert rows(tmp_path / "whole") == [2, 3, 4, 6, 7, 8, 10, 11]
    assert rows(tmp_path, die_after=5) + rows(tmp_path) == [2, 3, 4, 6, 7, 8, 10, 11]


@pytest.mark.parametrize("train", [sizes(4, 4, 4), Stream(4, 4, 4)])
def test_the_last_window_of_an_epoch_has_the_mean_of_its_batches(train: Any) -> None:
    fit = trainer(train=train, accumulate=2, max_duration="1ep").fit()

    assert fit.state.update == 2
    assert fit.module.w.item() == pytest.approx(2 - 2 * 0.8**2)


@pytest.mark.usefixtures("sigint_raises")
def test_a_run_that_resumes_within_a_window_ends_with_the_mean_of_its_batches(tmp_path: Path) -> None:
    class Ask(Callback):
        def on_step_end(self, fit: Fit, loss: Tensor) -> None:
            if fit.state.step == 4:
                signal.raise_signal(signal.SIGINT)

    policy = Checkpoints(folder=tmp_path, every="100st")
    with pytest.raises(KeyboardInterrupt):
        trainer(
            train=Stream(4, 4, 4, 4, 4), accumulate=3, max_duration="1ep", checkpoints=policy, callbacks=[Ask()]
        ).fit()

    fit = trainer(train=Stream(4, 4, 4, 4, 4), accumulate=3, max_duration="1ep", checkpoints=policy).fit()

    assert (fit.resumed_step, fit.state.update) == (4, 2)
    assert fit.module.w.item() == pytest.approx(2 - 2 * 0.8**2)


class Rising(nn.Module):
    """The loss is w times the mean of the batch: with rate 1, each update takes the mean of its window from w."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return (self.w * batch[0]).mean()


@pytest.mark.usefixtures("sigint_raises")
@pytest.mark.parametrize(
    ("planned", "at", "duration", "steps"),
    [("12st", 6, "7st", 7), ("6st", 5, "8st", 8), ("6st", 5, "3ep", 36), ("12st", 6, "3st", 7), ("12st", 6, "6st", 7)],
)
def test_a_window_that_a_changed_duration_ends_elsewhere_has_the_mean_of_its_batches(
    planned: str, at: int, duration: str, steps: int, tmp_path: Path
) -> None:
    class Ask(Callback):
        def on_step_end(self, fit: Fit, loss: Tensor) -> None:
            if fit.state.step == at and fit.resumed_step is None:
                signal.raise_signal(signal.SIGINT)

    def run(max_duration: str) -> Fit:
        numbers = TensorDataset(torch.arange(24.0))
        return trainer(
            module=Rising(),
            optimizer=partial(torch.optim.SGD, lr=1.0),
            train=Loader(numbers, 2, shuffle=False),
            accumulate=4,
            checkpoints=Checkpoints(folder=tmp_path, every="100st"),
            callbacks=[Ask()],
            max_duration=max_duration,
        ).fit()

    with pytest.raises(KeyboardInterrupt):
        run(planned)
    fit = run(duration)

    ends = sorted({*range(0, steps, 4), steps})
    means = [0.5 + 2 * (step % 12) for step in range(steps)]
    assert (fit.resumed_step, fit.state.step) == (at, steps)
    assert -fit.module.w.item() == pytest.approx(sum(fmean(means[a:b]) for a, b in itertools.pairwise(ends)))


@pytest.mark.parametrize("train", [sizes(4, 0, 4), Stream(4, 0, 4)])
def test_a_batch_without_rows_is_refused_with_its_place(train: Any) -> None:
    with pytest.raises(InvalidData, match=r"the batch at position 1 of epoch 0 has no rows: leave out empty batches"):
        trainer(train=train, max_duration="1ep").fit()


def test_a_batch_without_rows_is_refused_in_an_evaluation_too() -> None:
    with pytest.raises(InvalidData, match="position 2 of epoch 0 has no rows"):
        trainer(evaluate=sizes(4, 4, 0)).fit()


def test_data_that_is_shorter_than_it_says_is_refused() -> None:
    class Boasting(Stream):
        def __len__(self) -> int:
            return 4

    with pytest.raises(InvalidData, match=r"has 4 batches, and epoch 0 ended after 3: make its __len__ agree"):
        trainer(train=Boasting(4, 4, 4), max_duration="1ep").fit()


class Endless(Stream):
    """Has more batches than it says."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[list[Tensor]]:
        return itertools.cycle(sizes(*self._rows))


class Fewer(Stream):
    """Has fewer batches than it says."""

    def __len__(self) -> int:
        return len(self._rows) + 1


def test_an_epoch_has_as_many_batches_as_its_data_says_in_training_and_in_evaluation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fit = trainer(module=Gathers(), train=Endless(4, 3, 2), evaluate=Endless(4, 3, 2), max_duration="2ep").fit()

    assert (fit.state.step, fit.state.samples) == (4, 14)
    assert [record.getMessage() for record in caplog.records] == [
        "the Endless says that it has 2 batches and has more: those beyond its length are not read. Make its __len__ "
        "agree with what it yields, or leave __len__ out to read all of them"
    ] * 2  # of training and of evaluation


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (torch.ones(3, 2), 3),
        ([torch.ones(3)], 3),
        ({"text": ["a", "b"], "x": torch.ones(5, 2)}, 5),
        ({"text": ["a", "b"]}, 2),
        (("a", "b", "c"), 3),
        ([np.ones((4, 2)), np.ones(4)], 4),
        ([torch.tensor(1.0), torch.ones(6)], 6),
        ({"boxes": torch.ones(0, 4), "images": torch.ones(2, 3)}, 2),
        ([torch.ones(0), torch.ones(0, 2)], 0),
        ([{"x": 1.0}], 1),
        (object(), 1),
    ],
)
def test_the_rows_of_a_batch_are_found_in_what_it_is_made_of(batch: Any, rows: int) -> None:
    assert leading(batch) == rows


class Gathers(Slope):
    """Its evaluation counts rows."""

    def evaluation_step(self, batch: Any) -> Any:
        return {"loss": batch[0].mean()}


def uneven(folder: str) -> None:
    rank = int(os.environ["RANK"])
    own = [sizes(4, 4, 3), sizes(4, 2, 4, 4, 1)][rank]
    streams = [Stream(4, 4, 3), Stream(4, 2, 4, 4, 1)][rank]
    found: dict[str, Any] = {}
    for name, train in (("batches", own), ("stream", streams)):
        for accumulate in (1, 2):
            fit = trainer(train=train, max_duration="2ep", accumulate=accumulate, log_every="7sa").fit()
            found[f"{name}, {accumulate}"] = [fit.state.samples, fit.state.step, fit.state.update, fit.module.w.item()]
    values = [[torch.tensor([1.0, 2.0])], [torch.tensor([3.0])]]
    sets = {"uneven": values if rank == 0 else [], "empty": [] if rank == 0 else Stream()}
    sets["uneven"] = values if rank == 0 else [[torch.tensor([6.0])]]
    found["evaluated"] = trainer(module=Gathers(), evaluate={"uneven": sets["uneven"]}).fit().results["uneven/loss"]
    found["none on one"] = counted(Stream(3, 2) if rank else Stream())
    for train in (sizes(4, 4, 4), Stream(4, 4, 4)):
        empty = sizes(4, 0, 4) if isinstance(train, list) else Stream(4, 0, 4)
        try:
            trainer(train=empty if rank else train, max_duration="1ep").fit()
        except TrainkitError as error:
            found.setdefault("empty", []).append(str(error))
    for sets in ([sizes(4, 4, 4), sizes(4, 0, 4)], [sizes(4, 4, 4), Fewer(4, 4)]):
        try:
            trainer(max_duration="1ep", evaluate={"set": sets[rank]}).fit()
        except TrainkitError as error:
            found.setdefault("evaluated wrongly", []).append(str(error).removeprefix("on process 1: "))
    found["endless"] = counted(Endless(4, 3) if rank else Endless(4, 2, 2))
    found["loader"] = [counted(SHORT["loader"](), accumulate=each) for each in (1, 2)]
    found["torch's loader"] = counted(DataLoader(ones(11), 2, shuffle=True))
    place = Path(folder) / "stream"
    found["resumed"] = [_resumed(streams, place, 3), counted(streams)]
    (Path(folder) / f"found-{rank}").write_text(json.dumps(found))


def _resumed(train: Any, folder: Path, die_after: int) -> list[int]:
    lives = [Counts(die_after), Counts()]
    for life in lives:
        policy = Checkpoints(folder=folder, every=f"{die_after}st")
        try:
            trainer(train=train, callbacks=[life], checkpoints=policy, max_duration="2ep").fit()
        except KeyboardInterrupt:
            assert life is lives[0]
    return [each for life in lives for each in life.samples]


def test_processes_with_other_numbers_of_batches_end_together_and_count_the_same(tmp_path: Path, forks: Any) -> None:
    forks.succeed(uneven, tmp_path, processes=2)

    one, other = (json.loads((tmp_path / f"found-{rank}").read_text()) for rank in range(2))
    assert one == other
    for name in ("batches", "stream"):
        assert one[f"{name}, 1"] == [2 * 26, 10, 10, pytest.approx(2 - 2 * 0.8**10, rel=1e-5)]
        assert one[f"{name}, 2"] == [2 * 26, 10, 6, pytest.approx(2 - 2 * 0.8**6, rel=1e-5)]
    assert one["evaluated"] == pytest.approx((1 + 2 + 3 + 6) / 4)
    assert one["none on one"] == [3, 5, 8, 10]
    assert all("position 1 of epoch 0 has no rows on process 1" in message for message in one["empty"])
    assert len(one["empty"]) == 2
    no_rows, fewer = one["evaluated wrongly"]
    assert no_rows.startswith("the batch at position 1 of epoch 0 has no rows")
    assert fewer.startswith("the data says that it has 3 batches, and epoch 0 ended after 2")
    assert one["endless"] == [8, 13, 21, 26]
    assert one["loader"] == [[4, 8, 11, 15, 19, 22]] * 2
    assert one["torch's loader"] == [4, 8, 11, 15, 19, 22]
    resumed, whole = one["resumed"]
    assert resumed == whole == [8, 14, 21, 25, 26, 34, 40, 47, 51, 52]
