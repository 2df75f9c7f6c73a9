"""Metrics of one's own, on one process and on several."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainkit.errors import InvalidSetup, InvalidStep
from trainkit.metrics import Metric, PerProcess, WholeSet


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


@pytest.mark.spec("AC-103")
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


PROGRAM = """
import sys
import torch
import torch.distributed as dist
from trainkit.errors import InvalidStep
from trainkit.metrics import PerProcess, WholeSet

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
rank = dist.get_rank()


class Seen(WholeSet):
    calls = 0

    def score(self, rows, labels):
        Seen.calls += 1
        self.rows, self.labels = rows, labels
        return {"sum": rows.sum(), "last": labels["of"][-1].sum()}


class Hits(PerProcess):
    def score(self, hits):
        return hits.mean()


class Broken(WholeSet):
    def score(self, rows):
        raise KeyError("nothing here")


# 33 rows in steps of 8, each step divided between the two; the last row is of the second process alone.
seen = Seen()
for step in range(5):
    whole = torch.arange(step * 8, min(step * 8 + 8, 33))
    middle = len(whole) // 2
    part = whole[:middle] if rank == 0 else whole[middle:]
    if len(part):
        seen.update(part.float(), {"of": part[:, None] * torch.tensor([[1, 10]])})
assert seen.compute() == {"sum": sum(range(33)), "last": 352.0}
assert Seen.calls == (rank == 0)
if rank == 0:
    assert torch.equal(seen.rows, torch.arange(33.0)), seen.rows
    assert seen.labels["of"].shape == (33, 2)

for counts, expected in (((30, 10), 0.875), ((20, 20), 0.75), ((5, 0), 1.0)):
    hits = Hits()
    rows = counts[rank]
    if rows:
        hits.update(torch.ones(rows) if rank == 0 else (torch.arange(rows) % 2).float())
    assert hits.compute() == expected, (counts, hits.compute())

broken = Broken()
broken.update(torch.ones(1))
try:
    broken.compute()
except InvalidStep as error:
    assert "nothing here" in str(error)
else:
    raise AssertionError("no error")
dist.destroy_process_group()
print("good")
"""


@pytest.mark.spec("AC-040")
@pytest.mark.spec("AC-105")
def test_uneven_rows_of_two_processes_count_once_and_in_order(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "meet"), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ends = [process.communicate(timeout=280) for process in processes]
    assert [output for output, _ in ends] == ["good\n", "good\n"], "\n".join(errors for _, errors in ends)


def test_a_torchmetric_is_a_metric_as_it_is() -> None:
    from torchmetrics.classification import MulticlassAccuracy

    assert isinstance(MulticlassAccuracy(3), Metric)
