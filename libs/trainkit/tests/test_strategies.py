"""The same module, data and settings on every strategy end with the same weights."""

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
from trainkit import Callback, Loss, Trainer
from trainkit.data import Loader
from trainkit.errors import TrainkitError
from trainkit.loop.fit import Fit
from trainkit.module import ManualModule
from trainkit.precision import Precision
from trainkit.strategies import DDP
from trainkit.strategies.ddp import _buckets

TOLERANCE = 1e-6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        self.scale = nn.Parameter(torch.ones(1))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(self.layers(inputs) * self.scale, labels)


class Counting(Net):
    """Counts only some of the samples, a different number in every batch."""

    def training_step(self, batch: list[Tensor]) -> Any:
        inputs, labels = batch
        losses = F.cross_entropy(self.layers(inputs) * self.scale, labels, reduction="none")
        counted = inputs[:, 0] > 0
        return Loss(losses[counted].sum(), counted.sum())


def data(samples: int = 26) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 5, generator=generator), torch.arange(samples) % 3)


def trained(module: type[nn.Module] = Net, **options: Any) -> Fit:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "optimizer": partial(torch.optim.AdamW, lr=0.01),
        "train": Loader(data(), batch_size=8),
        "evaluate": Loader(data(11), batch_size=4, shuffle=False),
        "max_duration": "3ep",
        "accumulate": 3,
        "clip_norm": 0.5,
        **options,
    }
    return Trainer(module=module(), **settings).fit()


def weights(fit: Fit) -> dict[str, list[float]]:
    whole = {name: w.full_tensor() if hasattr(w, "full_tensor") else w for name, w in fit.strategy.weights().items()}
    return {name: w.reshape(-1).tolist() for name, w in whole.items()}


def several(folder: str) -> None:
    """Trains with everything that a group of processes can be, and writes the weights of each down."""
    found: dict[str, Any] = {}
    for strategy in ("ddp", "fsdp"):
        for kind in (Net, Counting):
            fit = trained(kind, strategy=strategy)
            found[f"{strategy} {kind.__name__}"] = [weights(fit), fit.results, fit.train_loss, fit.state.tokens]
    Path(folder, f"found-{torch.distributed.get_rank()}").write_text(json.dumps(found))


class Large(Net):
    """The second process has little room."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = super().training_step(batch)
        if torch.distributed.get_rank() == 1 and len(batch[0]) > 2:
            loss.backward()
            raise torch.OutOfMemoryError("no room")
        return loss


class Hopeless(Net):
    """The second process has no room at all in its fifth step, the first of a window."""

    calls = 0

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.calls += self.training
        if torch.distributed.get_rank() == 1 and self.calls > 4:
            raise torch.OutOfMemoryError("no room")
        loss: Tensor = super().training_step(batch)
        return loss


class Unevaluated(Net):
    """The second process has no room for an evaluation."""

    def evaluation_step(self, batch: list[Tensor]) -> Tensor:
        if torch.distributed.get_rank() == 1:
            raise torch.OutOfMemoryError("no room")
        return self.training_step(batch)


class Alternating(ManualModule):
    """Uses one half of itself in a step, and the other half in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.halves, self.turn = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 3)]), 0

    def training_step(self, batch: list[Tensor]) -> Tensor:
        inputs, labels = batch
        loss = F.cross_entropy(self.halves[self.turn](inputs), labels)
        self.turn = 1 - self.turn
        self.updates.backward(loss)
        self.updates.step()
        self.updates.zero_grad()
        return loss


BY_HALVES: dict[str, Any] = {"module": Alternating, "accumulate": 1, "evaluate": None}


def by_halves(folder: str) -> None:
    Path(folder, f"found-{os.environ['RANK']}").write_text(json.dumps(weights(trained(strategy="ddp", **BY_HALVES))))


class Drifting(Callback):
    """Changes a weight on one process alone."""

    def on_update_end(self, fit: Fit) -> None:
        if fit.strategy.rank == 1 and fit.state.update == 2:
            fit.module.layers[2].bias.data[0] += 1e-7


def troubled(folder: str) -> None:
    """What goes wrong on one process reaches all of them."""
    found: dict[str, Any] = {"split": weights(trained(Large, strategy="ddp", out_of_memory="split"))}
    for name, options in {
        "hopeless": {"module": Hopeless, "out_of_memory": "split", "log_every": "1st"},
        "unevaluated": {"module": Unevaluated, "out_of_memory": "retry"},
        "drifting": {"callbacks": [Drifting()], "check_sync_every": "1up"},
    }.items():
        try:
            trained(strategy="ddp", **options)  # type: ignore[arg-type]
        except TrainkitError as error:
            found[name] = f"{type(error).__name__}: {error}"
    Path(folder, f"found-{torch.distributed.get_rank()}").write_text(json.dumps(found))


def assert_close(ours: Any, theirs: Any) -> None:
    for name in theirs:
        torch.testing.assert_close(torch.tensor(ours[name]), torch.tensor(theirs[name]), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("processes", [2, 4])
def test_ddp_and_fsdp_end_where_one_process_ends(tmp_path: Path, forks: Any, processes: int) -> None:
    forks.succeed(several, tmp_path, processes=processes)

    alone = {kind.__name__: trained(kind, log_every="3ep") for kind in (Net, Counting)}
    for rank in range(processes):
        for name, (ours, results, loss, tokens) in json.loads((tmp_path / f"found-{rank}").read_text()).items():
            expected = alone[name.split()[1]]
            assert_close(ours, weights(expected))
            assert results["val/loss"] == pytest.approx(expected.results["val/loss"], abs=1e-5)
            assert loss is not None
            assert tokens == expected.state.tokens


def test_trouble_of_one_process_is_recovered_from_or_told_by_all(tmp_path: Path, forks: Any) -> None:
    forks.succeed(troubled, tmp_path, processes=2)

    alone = weights(trained())
    for rank in range(2):
        found = json.loads((tmp_path / f"found-{rank}").read_text())
        assert_close(found["split"], alone)
        assert found["hopeless"].startswith("OutOfMemory: " + ("a step does not fit" if rank else "another process"))
        assert found["unevaluated"].startswith("OutOfMemory: " + ("a step of an eval" if rank else "another process"))
        assert found["drifting"].startswith("Desynchronized: parameter layers.2.bias differs on rank")


def test_what_no_process_used_in_a_step_by_hand_is_left_alone(tmp_path: Path, forks: Any) -> None:
    forks.succeed(by_halves, tmp_path, processes=2)

    assert_close(json.loads((tmp_path / "found-1").read_text()), weights(trained(**BY_HALVES)))


def test_one_process_ends_with_the_bits_of_a_loop_written_by_hand() -> None:
    fit = trained(accumulate=1, max_duration="2ep")

    torch.manual_seed(0)
    module, loader = Net().to(fit.strategy.device), Loader(data(), batch_size=8)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for epoch in range(2):
        for batch in loader.batches(epoch):
            module.training_step([each.to(fit.strategy.device) for each in batch]).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()

    assert all(
        torch.equal(ours, theirs) for ours, theirs in zip(fit.module.parameters(), module.parameters(), strict=True)
    )


@pytest.mark.parametrize("kind", [Net, Counting])
def test_accumulated_steps_make_the_update_of_one_large_batch(kind: type[nn.Module]) -> None:
    small = trained(kind, train=Loader(data(), 8, shuffle=False), accumulate=4, max_duration="3ep")
    large = trained(kind, train=Loader(data(), 26, shuffle=False), accumulate=1, max_duration="3ep")

    assert small.state.update == large.state.update == 3
    assert_close(weights(small), weights(large))


class Kinds(nn.Module):
    """Parameters of every kind that a gradient can be of."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.ParameterList([torch.ones(7, 5) for _ in range(6)])
        self.large, self.scale = nn.Parameter(torch.ones(50, 20)), nn.Parameter(torch.ones(()))
        self.doubles = nn.ParameterList([torch.ones(9, dtype=torch.float64) for _ in range(3)])
        self.halves = nn.ParameterList([torch.ones(11, dtype=torch.bfloat16) for _ in range(3)])
        self.images = nn.Parameter(torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
        self.rows = nn.Parameter(torch.ones(8, 2))
        self.of_one, self.of_nobody = nn.Parameter(torch.ones(13)), nn.Parameter(torch.ones(13))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def training_step(self, batch: Tensor) -> Tensor:
        return batch

    def draw(self, rank: int) -> None:
        """Gradients of one process."""
        generator = torch.Generator().manual_seed(rank)
        for name, p in self.named_parameters():
            if p.requires_grad and name != "of_nobody" and (name != "of_one" or rank == 1):
                p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
        self.rows.grad = torch.sparse_coo_tensor([[rank, 5]], torch.randn(2, 2, generator=generator), (8, 2))


class Telling(DDP):
    """Counts what it sends."""

    sent = 0

    def sum(self, values: Tensor) -> Tensor:
        self.sent += 1
        return super().sum(values)


def averaged(folder: str) -> None:
    strategy, module = Telling(bucket_mb=2**-10), Kinds()
    strategy.open("cpu")
    strategy.prepare(module, Precision("fp32", strategy.device))
    module.draw(strategy.rank)
    one_by_one = {}
    for name, p in module.named_parameters():
        if p.requires_grad and name != "of_nobody":
            one_by_one[name] = torch.zeros_like(p) if p.grad is None else p.grad.clone()
            torch.distributed.all_reduce(one_by_one[name])
            one_by_one[name] /= strategy.world_size
    strategy.sent = 0

    strategy.synchronise()

    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert found.keys() == one_by_one.keys()
    for name, gradient in found.items():
        assert gradient.layout == one_by_one[name].layout
        assert torch.equal(gradient.to_dense(), one_by_one[name].to_dense()), name
    assert module.images.grad.is_contiguous(memory_format=torch.channels_last)
    assert (len(found), strategy.sent) == (17, 1 + 6)  # who has which; then rows, 6+1, large, the rest, doubles, halves


def test_gradients_meet_in_few_pieces_with_the_bits_of_meeting_one_by_one(tmp_path: Path, forks: Any) -> None:
    forks.succeed(averaged, tmp_path, processes=2)


def test_what_is_sent_as_one_is_of_one_kind_and_bounded() -> None:
    single, double = torch.float32, torch.float64
    kinds = [(3, single), (1, double), (3, single), (5, single), (100, single), (1, single), (1, double)]

    cut = list(_buckets([torch.zeros(count, dtype=kind) for count, kind in kinds], most_bytes=24))

    pieces = [(bucket[0].dtype, [len(each) for each in bucket]) for bucket in cut]
    assert pieces == [(single, [3, 3]), (single, [5]), (single, [100]), (double, [1, 1]), (single, [1])]
