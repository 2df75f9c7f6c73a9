"""A checkpoint of any strategy resumes with any other one, and ends where a run without an interruption ends."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.data import TensorDataset
from trainkit import Checkpoints, Trainer
from trainkit.checkpoints.snapshot import own_file
from trainkit.data import Loader
from trainkit.errors import WrongCheckpoint
from trainkit.loop.fit import Fit
from trainkit.sharded import whole
from trainkit.strategies import DeepSpeed, Strategy

SEVERAL = ("ddp", "fsdp", "zero-1", "zero-2", "zero-3")
STRATEGIES = ("single", *SEVERAL)


class Net(nn.Module):
    """Has parameters of sizes that no number of processes divides, one without dimensions, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.scale = nn.Parameter(torch.ones(1))
        self.still = nn.Parameter(torch.ones(3), requires_grad=False)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.layers(inputs) * self.scale * self.still, labels)


def grouped(named: Iterable[tuple[str, Parameter]]) -> torch.optim.Optimizer:
    """Two groups, in another order than that of the module."""
    named = list(named)
    biases = [p for name, p in named if name.endswith("bias")]
    others = [p for name, p in named if not name.endswith("bias")]
    return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": others}], lr=0.05, weight_decay=0.1)


def chosen(name: str) -> Strategy | str:
    return DeepSpeed(stage=int(name[-1]), persist_below=4) if name.startswith("zero") else name  # type: ignore[arg-type]


def trained(name: str, steps: int, checkpoints: Checkpoints) -> Fit:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 5, generator=generator), torch.arange(24) % 3)
    return Trainer(
        module=Net(),
        optimizer=grouped,
        train=Loader(data, batch_size=8),
        max_duration=f"{steps}st",
        strategy=chosen(name),
        log_every=None,
        checkpoints=checkpoints,
    ).fit()


def begin(folder: Path, name: str) -> None:
    trained(name, 3, Checkpoints(folder=folder / name, every=None))


def resumed(folder: Path, before: str, after: str) -> dict[str, Any]:
    source = folder / before / "step-3"
    policy = Checkpoints(folder=folder / f"{before}-{after}", every=None, at_end=False, resume=source)
    fit = trained(after, 6, policy)
    assert fit.resumed_step == 3
    return {name: whole(weight).reshape(-1).tolist() for name, weight in fit.strategy.weights().items()}


RING = ("zero-1", "zero-2", "zero-3", "zero-1")
PAIRS = [
    (before, after)
    for before, after in itertools.product(STRATEGIES, SEVERAL)
    if (before != after and not (before in RING and after in RING)) or (before, after) in itertools.pairwise(RING)
]


def all_pairs(folder: str) -> None:
    """Every strategy of several processes, from the checkpoints of others; a stage of DeepSpeed from the one before."""
    for name in SEVERAL:
        begin(Path(folder), name)
    found = {f"{before} to {after}": resumed(Path(folder), before, after) for before, after in PAIRS}
    Path(folder, f"found-{torch.distributed.get_rank()}").write_text(json.dumps(found))


def test_every_strategy_resumes_from_the_checkpoints_of_every_other_one(tmp_path: Path, forks: Any) -> None:
    begin(tmp_path, "single")
    wanted = resumed(tmp_path, "single", "single")

    forks.succeed(all_pairs, tmp_path, processes=2)
    found = {f"{before} to single": resumed(tmp_path, before, "single") for before in SEVERAL}

    for rank in range(2):
        for pair, weights in {**found, **json.loads((tmp_path / f"found-{rank}").read_text())}.items():
            assert weights.keys() == wanted.keys()
            for name, weight in wanted.items():
                assert weights[name] == pytest.approx(weight, abs=2e-6, rel=2e-6), (pair, name)

    without_layout(tmp_path / "zero-2" / "step-3")
    with pytest.raises(
        WrongCheckpoint, match="without their layout, from an older trainkit: resume with the same stage"
    ):
        resumed(tmp_path, "zero-2", "single")


def test_deepspeed_cuts_its_buckets_into_equal_parts_of_an_even_size_on_any_number_of_processes() -> None:
    for world_size in (1, 2, 3):
        strategy = DeepSpeed(stage=2)
        strategy.module, strategy.world_size = Net(), world_size
        bucket = strategy._config(strategy.module)["zero_optimization"]["allgather_bucket_size"]
        assert bucket % (2 * world_size) == 0


def without_layout(checkpoint: Path) -> None:
    """As trainkit stored it before it could resume with another strategy."""
    for rank in range(2):
        values = json.loads((checkpoint / own_file(rank)).read_text())
        del values["strategy"]["layout"]
        (checkpoint / own_file(rank)).write_text(json.dumps(values))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"] = [file for file in manifest["files"] if not file["name"].startswith("rank-")]
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
