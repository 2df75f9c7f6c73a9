"""How much fits, and who is slow."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainkit import Trainer
from trainkit.callbacks import Stragglers
from trainkit.data import Loader
from trainkit.errors import InvalidSetup, OutOfMemory
from trainkit.module import ManualModule
from trainkit.trackers import RunContext, Tracker
from trainkit.tuning import largest_batch_size


class Roomy(nn.Module):
    """Has room for so many samples at once."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room, self.w = room, nn.Parameter(torch.zeros(()))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        if len(batch[0]) > self.room:
            raise torch.OutOfMemoryError("no room")
        return (self.w * batch[0] - 2).square().mean()


def trainer(size: int, room: int = 1000, samples: int = 200, **options: Any) -> Trainer:
    return Trainer(
        module=Roomy(room),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        train=Loader(TensorDataset(torch.ones(samples)), size),
        max_duration="1ep",
        **options,
    )


@pytest.mark.parametrize(("room", "found"), [(13, 13), (1000, 200)])
def test_the_largest_batch_is_found(room: int, found: int) -> None:
    assert largest_batch_size(lambda size: trainer(size, room)) == found


def test_a_size_is_found_within_its_sixteenth_without_trying_them_all() -> None:
    tried: list[int] = []

    def make(size: int) -> Trainer:
        tried.append(size)
        return trainer(size, 99)

    found = largest_batch_size(make, start=8, most=150)

    assert 99 - 99 // 16 <= found <= 99
    assert max(tried) <= 150 and len(set(tried)) < 10


def test_what_does_not_fit_at_all_and_what_is_no_loader_is_told() -> None:
    with pytest.raises(OutOfMemory, match="not even a batch of 4 fits"):
        largest_batch_size(lambda size: trainer(size, 3), start=4)
    with pytest.raises(InvalidSetup, match="the training data is a list"):
        largest_batch_size(lambda size: Trainer(**{**vars(trainer(size)), "train": [1]}))


def test_other_errors_of_a_try_are_raised() -> None:
    class Broken(Roomy):
        def training_step(self, batch: list[Tensor]) -> Tensor:
            raise RuntimeError("of the module")

    with pytest.raises(RuntimeError, match="of the module"):
        largest_batch_size(lambda size: Trainer(**{**vars(trainer(size)), "module": Broken(1)}))


class Ticking(Stragglers):
    """Every look at the clock takes so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__("4st")
        self._ticks = count()
        self._seconds = seconds

    def clock(self) -> float:
        return next(self._ticks) * self._seconds


def slow(folder: str) -> None:
    """The last of three processes has a clock on which everything takes three times as long."""
    rank = int(os.environ["RANK"])
    stragglers = Ticking(3.0 if rank == 2 else 1.0)
    trainer(9, strategy="ddp", callbacks=[stragglers]).fit()
    found = [[one.rank, one.step, one.loading_s, one.forward_s, one.others_s] for one in stragglers.found]
    (Path(folder) / f"found-{rank}").write_text(json.dumps(found))


def test_a_process_that_is_slower_than_the_others_is_named_everywhere(tmp_path: Path, forks: Any) -> None:
    forks.succeed(slow, tmp_path, processes=3)

    found = [json.loads((tmp_path / f"found-{rank}").read_text()) for rank in range(3)]
    assert found[0] == found[1] == found[2]
    assert [one[:2] for one in found[0]] == [[2, step] for step in (4, 8, 12, 16, 20)]
    assert all(one[2:] == [3.0, 3.0, 2.0] for one in found[0])
    assert "rank 2 is slow up to step 4" in (tmp_path / "rank-0.log").read_text()


def test_processes_that_are_alike_are_not_named() -> None:
    stragglers = Ticking(1.0)
    trainer(9, callbacks=[stragglers]).fit()

    assert stragglers.found == []
    with pytest.raises(InvalidSetup, match="factor has to be above 1"):
        Stragglers(factor=1.0)


def test_neither_evaluations_nor_steps_without_a_backward_pass_disturb_the_comparison() -> None:
    now = [0.0]

    class Timed(Stragglers):
        def clock(self) -> float:
            return now[0]

    class Idle(ManualModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(()))

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return self.w * 0

        def evaluation_step(self, batch: list[Tensor]) -> Tensor:
            now[0] += 1000.0
            return self.w * 0

    class Kept(Tracker):
        def open(self, context: RunContext) -> None: ...
        def close(self, outcome: str) -> None: ...

        def log(self, values: Mapping[str, float | Tensor], step: int) -> None:
            rows.append(dict(values))

    rows: list[dict[str, Any]] = []
    data = Loader(TensorDataset(torch.ones(8)), 2)
    options = {"evaluate": data, "evaluate_every": "1st", "callbacks": [Timed("4st")], "trackers": [Kept()]}
    Trainer(**{**vars(trainer(2, samples=8, log_every=None)), **options, "module": Idle()}).fit()

    assert [row["step_time/slowest"] for row in rows if "step_time/slowest" in row] == [0.0]
