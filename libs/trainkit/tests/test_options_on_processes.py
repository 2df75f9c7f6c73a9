"""What saves time and memory does the same on several processes as on one, and weights that went apart are found."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainkit import Callback, Trainer
from trainkit.data import Loader
from trainkit.errors import Desynchronized
from trainkit.loop.fit import Fit
from trainkit.strategies import FSDP

TOLERANCE = {"plain": 1e-6, "recompute": 1e-6, "compile": 1e-6, "bf16": 5e-3, "fp16": 5e-3}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 16)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.linear(inputs))


class Counted(Block):
    """Counts how often it computes."""

    computed = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.computed += 1
        return super().forward(inputs)


class Net(nn.Module):
    block = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(self.block(5), self.block(16)), nn.Linear(16, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.head(self.blocks(inputs))
        return output

    def training_step(self, batch: list[Tensor]) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self(inputs), labels)


class CountedNet(Net):
    block = Counted


class Overflowing(Net):
    """One gradient overflows on the last process, in its third step."""

    steps = 0

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.steps += 1
        loss = super().training_step(batch)
        if self.steps == 3 and int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1:
            loss = loss + torch.inf * self.head.bias[0]
        return loss


class Compiler:
    """A backend of torch.compile that runs what it gets, and counts it."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.graphs += 1
        return graph.forward


def trained(kind: type[Net] = Net, **options: Any) -> Fit:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(26, 5, generator=generator), torch.arange(26) % 3)
    settings: dict[str, Any] = {"max_duration": "2ep", "accumulate": 2, "clip_norm": 0.5, **options}
    optimizer = partial(torch.optim.SGD, lr=0.5, momentum=0.5)
    return Trainer(module=kind(), optimizer=optimizer, train=Loader(data, batch_size=8), **settings).fit()


def case(name: str, **options: Any) -> dict[str, Any]:
    """Trains one case of `TOLERANCE`: the weights, and what shows that it was what it is called."""
    compiler = Compiler()
    torch.compiler.reset()
    given: dict[str, dict[str, Any]] = {
        "plain": {"kind": CountedNet},
        "recompute": {"kind": CountedNet, "recompute": [Block]},
        "compile": {"compile": {"backend": compiler}},
        "bf16": {"precision": "bf16"},
        "fp16": {"precision": "fp16", "kind": Overflowing, "non_finite": "ignore", "accumulate": 1, "log_every": None},
    }
    fit = trained(**given[name], **options)
    module, scaler = fit.module, fit.strategy.precision.scaler
    assert isinstance(module, Net)
    weights = {key: w.full_tensor() if hasattr(w, "full_tensor") else w for key, w in fit.strategy.weights().items()}
    return {
        "weights": {key: weight.reshape(-1).tolist() for key, weight in weights.items()},
        "computed": getattr(module.blocks[0], "computed", 0),
        "graphs": compiler.graphs,
        "skipped": fit.state.skipped,
        "scale": scaler.get_scale() if scaler is not None else None,
    }


def on_each(folder: str, name: str) -> None:
    """The case on every strategy."""
    found = [case(name, strategy=strategy) for strategy in ("ddp", FSDP(units=[Block]))]
    Path(folder, f"found-{os.environ['RANK']}").write_text(json.dumps(found))


@pytest.mark.parametrize("name", TOLERANCE)
def test_what_saves_time_and_memory_ends_on_two_processes_where_one_ends(tmp_path: Path, forks: Any, name: str) -> None:
    forks.succeed(on_each, tmp_path, processes=2, name=name)

    alone, close = case(name), {"atol": TOLERANCE[name], "rtol": TOLERANCE[name]}
    for ours in [each for rank in range(2) for each in json.loads((tmp_path / f"found-{rank}").read_text())]:
        for key, weight in alone["weights"].items():
            torch.testing.assert_close(torch.tensor(ours["weights"][key]), torch.tensor(weight), **close)
        assert [ours[key] for key in ("computed", "skipped", "scale")] == [
            alone[key] for key in ("computed", "skipped", "scale")
        ]
        assert bool(ours["graphs"]) == bool(alone["graphs"]) == (name == "compile")


def test_each_saving_is_what_it_is_called() -> None:
    assert case("recompute")["computed"] == 2 * case("plain")["computed"] > 0
    assert (case("fp16")["skipped"], case("fp16")["scale"]) == (1, 2.0**15)


class Drifting(Callback):
    """Changes one weight on one process alone, by what rounding could be."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def on_update_end(self, fit: Fit) -> None:
        if fit.strategy.rank == self._rank and fit.state.update == 2:
            fit.module.get_parameter("blocks.1.linear.bias").data[3] += 1e-7


def drifting(folder: str, rank: int) -> None:
    said = "it went on"
    try:
        trained(strategy="ddp", callbacks=[Drifting(rank)], check_sync_every="1up")
    except Desynchronized as error:
        said = str(error)
    Path(folder, f"said-{os.environ['RANK']}").write_text(said)


@pytest.mark.parametrize(("processes", "rank"), [(2, 1), (3, 0), (4, 2)])
def test_a_weight_that_one_process_changed_is_named_with_its_rank_by_all(
    tmp_path: Path, forks: Any, processes: int, rank: int
) -> None:
    forks.succeed(drifting, tmp_path, processes=processes, rank=rank)

    said = {(tmp_path / f"said-{each}").read_text() for each in range(processes)}
    assert len(said) == 1
    assert said.pop().startswith(f"parameter blocks.1.linear.bias differs on rank {rank} from the other processes")


def test_processes_that_are_alike_go_on(tmp_path: Path, forks: Any) -> None:
    forks.succeed(drifting, tmp_path, processes=2, rank=-1)

    assert (tmp_path / "said-0").read_text() == (tmp_path / "said-1").read_text() == "it went on"
