"""Batch norm: a last batch that is too short is refused at once, and FSDP computes in 16 bits what one process does."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset
from trainkit import Trainer
from trainkit.data import Loader
from trainkit.errors import InvalidSetup
from trainkit.loop.fit import Fit
from trainkit.precision import Precision
from trainkit.sharded import whole
from trainkit.strategies import FSDP


class Images(nn.Module):
    """Norms, a table that is written into, and targets that 16 bits do not hold."""

    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.bias = nn.Embedding(5, 4), nn.Parameter(torch.zeros(4))
        self.blocks = nn.ModuleList([nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 1)
        self.flat = flat
        self.seen: set[torch.dtype] = set()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        words, wanted = batch
        self.seen.add(wanted.dtype)
        hidden = self.embedding(words).transpose(1, 2)
        table = torch.zeros(4)
        table[torch.arange(4)] = self.bias
        for block in self.blocks:
            hidden = hidden + block(hidden)
        if self.flat:
            hidden = self.blocks[0][1](hidden.mean(2))[:, :, None]
        found = self.head(self.norm(hidden.transpose(1, 2).mean(1) + table))
        return F.mse_loss(found.float()[:, 0], wanted - 1000)


def trained(flat: bool = False, samples: int = 16, **options: Any) -> Fit:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randint(5, (samples, 3), generator=generator), 1000 + torch.arange(samples) / 64)
    settings: dict[str, Any] = {"train": Loader(data, 8), "max_duration": "2ep", "device": "cpu", **options}
    return Trainer(module=Images(flat), optimizer=partial(torch.optim.SGD, lr=0.05), **settings).fit()


def weights(fit: Fit) -> dict[str, list[float]]:
    return {name: whole(each).reshape(-1).tolist() for name, each in fit.strategy.weights().items()}


class Mixed(Images):
    def __init__(self) -> None:
        super().__init__()
        self.head.to(torch.bfloat16)


class Points(nn.Module):
    """Norms points, of which a sample has several."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.norm(batch[0].flatten(0, 1)).square().mean()


class Batches(IterableDataset[Tensor]):
    """A stream of single samples."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for at in range(self._samples):
            yield torch.arange(3) % (at + 2), torch.tensor(at / 64)


def two(folder: str) -> None:
    with pytest.raises(InvalidSetup, match=r"blocks.0.1 .* a process has a batch of a single row"):
        trained(flat=True, strategy="ddp", train=Loader(Batches(11), 8))
    rows = {"train": Loader(TensorDataset(torch.randint(5, (11, 3)), torch.zeros(11)), 8)}
    with pytest.raises(InvalidSetup, match=r"blocks.0.1 .* 3 sample\(s\) for 2 process\(es\)"):
        trained(flat=True, strategy="ddp", **rows)
    with pytest.raises(InvalidSetup, match="bfloat16, and fsdp keeps the parameters of a unit in one format"):
        mixed = FSDP()
        mixed.open("cpu")
        mixed.prepare(Mixed(), Precision("fp32", mixed.device))
    found = {}
    for name, strategy in {"fsdp": FSDP(), "full": FSDP(gather_in_full=True), "ddp": "ddp"}.items():
        fit = trained(strategy=strategy, precision="bf16")
        assert fit.module.seen == {torch.float32}
        found[name] = weights(fit)
    Path(folder, f"found-{os.environ['RANK']}").write_text(json.dumps(found))


def test_fsdp_in_16_bits_trains_norms_and_ends_where_ddp_ends(tmp_path: Path, forks: Any) -> None:
    forks.succeed(two, tmp_path, processes=2)

    found = json.loads((tmp_path / "found-0").read_text())  # whose running statistics count
    for name in ("fsdp", "full"):
        for key, values in found["ddp"].items():
            assert found[name][key] == pytest.approx(values, abs=1e-5), key


def test_batch_norm_that_gets_a_single_row_of_a_stream_or_an_iterable_is_refused() -> None:
    plain = [[torch.randint(5, (rows, 3)), torch.zeros(rows)] for rows in (4, 1)]
    for train in (Loader(Batches(9), 8), plain):
        with pytest.raises(InvalidSetup, match=r"BatchNorm1d and needs two .* a single row: leave out batches"):
            trained(flat=True, train=train)


def test_a_last_sample_of_several_points_reaches_batch_norm() -> None:
    points = Loader(TensorDataset(torch.randn(9, 5, 2)), 8)
    fit = Trainer(
        module=Points(), optimizer=partial(torch.optim.SGD, lr=0.1), train=points, max_duration="1ep", device="cpu"
    ).fit()
    assert fit.state.step == 2


def test_batch_norm_that_a_single_row_would_reach_is_refused_in_the_first_step() -> None:
    with pytest.raises(InvalidSetup, match=r"1 sample\(s\) for 1 process\(es\).*drop_last=True"):
        trained(flat=True, samples=9)


@pytest.mark.parametrize(
    "options",
    [{"samples": 9}, {"flat": True}, {"flat": True, "samples": 9, "max_duration": "1st"}],
    ids=["several values in a row", "no single row", "ends before it"],
)
def test_batch_norm_that_gets_enough_values_is_trained(options: dict[str, Any]) -> None:
    assert trained(**options).state.finished
