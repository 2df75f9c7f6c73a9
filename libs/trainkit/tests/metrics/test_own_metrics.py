"""Metrics of one's own, on one process and on several."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainkit.data import Loader
from trainkit.errors import InvalidSetup, InvalidStep
from trainkit.metrics import Metric, PerProcess, WholeSet
from trainkit.trainer import Trainer


class Seen(WholeSet):
    """Keeps what it was given."""

    def score(self, *values: Any) -> Mapping[str, float]:
        self.values = values
        return {"rows": float(len(values[0])), "sum": float(values[0].sum())}


class Hits(PerProcess):
    def score(self, guesses: Tensor, labels: Tensor) -> Tensor:
        return (guesses == labels).float().mean()


def test_all_rows_are_seen_at_once_in_order() -> None:
    metric = Seen()
    for start in (0, 3, 6):
        rows = torch.arange(start, min(start + 3, 7))
        metric.update(rows, {"twice": rows * 2})
    assert isinstance(metric, Metric)
    assert metric.compute() == {"rows": 7.0, "sum": 21.0}
    assert torch.equal(metric.values[0], torch.arange(7))
    assert torch.equal(metric.values[1]["twice"], torch.arange(7) * 2)
    metric.reset()
    metric.update(torch.ones(2))
    assert metric.compute() == {"rows": 2.0, "sum": 2.0}


@pytest.mark.spec("AC-104")
@pytest.mark.parametrize(
    ("cast", "kept"), [(torch.float32, torch.float32), (None, torch.bfloat16), ("float16", torch.float16)]
)
def test_floating_values_are_cast_and_whole_numbers_are_not(cast: Any, kept: torch.dtype) -> None:
    metric = Seen(cast=cast)
    metric.update(torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int64))
    metric.compute()
    assert [value.dtype for value in metric.values] == [kept, torch.int64]


@pytest.mark.parametrize("cast", ["float99", "int64", "Tensor"])
def test_a_type_that_is_none_is_refused(cast: str) -> None:
    with pytest.raises(InvalidSetup, match="cast="):
        Seen(cast=cast)


def test_rows_that_do_not_match_are_refused_unless_nobody_wants_to_know() -> None:
    with pytest.raises(InvalidStep, match=r"Seen, batch 0: numbers of rows differ: shapes \[\(8,\), \(7,\)\]"):
        Seen().update(torch.ones(8), torch.ones(7))
    unchecked = Seen(check=False)
    unchecked.update(torch.ones(8), torch.ones(7))
    assert unchecked.compute() == {"rows": 8.0, "sum": 8.0}
    later = Seen()
    later.update(torch.ones(8, 2))
    with pytest.raises(InvalidStep, match=r"batch 1: shapes \[\(8, 3\)\] do not go with \[\(8, 2\)\] before"):
        later.update(torch.ones(8, 3))


def test_what_is_no_number_is_refused() -> None:
    class Wrong(WholeSet):
        def score(self, values: Tensor) -> Any:
            return values

    metric = Wrong()
    metric.update(torch.ones(2))
    with pytest.raises(InvalidStep, match=r"Wrong\.score has to return a number"):
        metric.compute()
    with pytest.raises(InvalidStep, match="has no rows"):
        Wrong().compute()


class Broken(WholeSet):
    def score(self, rows: Tensor) -> Any:
        raise KeyError("nothing here")


def gathered(folder: str) -> None:
    """33 rows in steps of 8, each step divided between two processes; the last row is of the second one alone."""
    rank, seen = dist.get_rank(), Seen()
    for step in range(5):
        whole = torch.arange(step * 8, min(step * 8 + 8, 33))
        middle = len(whole) // 2
        part = whole[:middle] if rank == 0 else whole[middle:]
        if len(part):
            seen.update(part, {"of": part[:, None] * torch.tensor([[1, 10]])})
    assert seen.compute() == {"rows": 33.0, "sum": float(sum(range(33)))}
    assert hasattr(seen, "values") == (rank == 0)  # computed once
    if rank == 0:
        assert torch.equal(seen.values[0], torch.arange(33))
        assert torch.equal(seen.values[1]["of"], torch.arange(33)[:, None] * torch.tensor([[1, 10]]))


def averaged(folder: str) -> None:
    """The first process is always right, the second every other time."""
    for counts, expected in (((30, 10), 0.875), ((20, 20), 0.75), ((5, 0), 1.0)):
        hits, rows = Hits(), counts[dist.get_rank()]
        if rows:
            labels = torch.ones(rows) if dist.get_rank() == 0 else torch.arange(rows) % 2
            hits.update(torch.ones(rows), labels)
        assert hits.compute() == expected


def broken(folder: str) -> None:
    metric = Broken()
    metric.update(torch.ones(1))
    with pytest.raises(InvalidStep, match="nothing here"):
        metric.compute()


@pytest.mark.spec("AC-040")
def test_uneven_rows_of_two_processes_come_once_and_in_order(forks: Any, tmp_path: Path) -> None:
    forks.succeed(gathered, tmp_path, processes=2)


@pytest.mark.spec("AC-105")
def test_scores_of_processes_are_averaged_by_rows(forks: Any, tmp_path: Path) -> None:
    forks.succeed(averaged, tmp_path, processes=2)


def test_an_error_in_the_score_is_told_on_every_process(forks: Any, tmp_path: Path) -> None:
    forks.succeed(broken, tmp_path, processes=2)


class Guess(nn.Module):
    """Says the class that the input is; wrong where the second column says so."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any) -> Tensor:
        return (self.w**2).sum()

    def evaluation_step(self, batch: Any) -> dict[str, Any]:
        inputs, labels = batch
        return {"accuracy": (inputs[:, 0].long(), labels), "seen": (inputs[:, 0], labels)}


def evaluated(folder: str) -> None:
    """Two sets of 33 and 7 rows, batches of 8, as many processes as there are."""
    from torchmetrics.classification import MulticlassAccuracy

    def rows(count: int, wrong: int) -> Loader:
        labels = torch.arange(count) % 3
        guesses = torch.where(torch.arange(count) < wrong, (labels + 1) % 3, labels)
        return Loader(TensorDataset(guesses[:, None].float(), labels), 8, shuffle=False)

    fit = Trainer(
        module=Guess(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        train=rows(8, 0),
        evaluate={"clean": rows(33, 3), "noisy": rows(7, 6)},
        metrics={"accuracy": MulticlassAccuracy(3, average="micro"), "seen": Seen()},
        max_duration="1ep",
        device="cpu",
    ).fit()
    assert fit.results["clean/seen/rows"] == 33 and fit.results["noisy/seen/rows"] == 7
    assert fit.results["clean/accuracy"] == pytest.approx(30 / 33)
    assert fit.results["noisy/accuracy"] == pytest.approx(1 / 7)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_metrics_of_several_sets_are_exact_on_any_number_of_processes(
    processes: int, forks: Any, tmp_path: Path
) -> None:
    forks.succeed(evaluated, tmp_path, processes=processes)


def test_a_torchmetric_is_a_metric_as_it_is() -> None:
    from torchmetrics.classification import MulticlassAccuracy

    assert isinstance(MulticlassAccuracy(3), Metric)
