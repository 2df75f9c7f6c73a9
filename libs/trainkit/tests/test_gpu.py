"""Training on a CUDA device: what only a device that computes behind the host's back can show."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from trainkit import Callback, Checkpoints, Trainer
from trainkit.callbacks import EMA
from trainkit.data import Loader
from trainkit.errors import Interrupted
from trainkit.loop.fit import Fit
from trainkit.module import Loss
from trainkit.sharded import whole
from trainkit.trackers import JsonLines, RunContext, Tracker

from scripts.testbed.ports import free_port

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
    # torch tells of what its versions for devices cannot do yet; the tests look at results
    pytest.mark.filterwarnings("default::UserWarning"),
]

SHARING = """
from functools import partial
import torch
from trainkit import Trainer

class Net(torch.nn.Linear):
    def training_step(self, batch):
        return self(batch).mean()

Trainer(
    module=Net(1, 1),
    optimizer=partial(torch.optim.SGD, lr=0.1),
    train=[torch.ones(2, 1)],
    max_duration="1st",
    strategy="ddp",
).fit()
"""
SAMPLES, BATCH, WIDTH = 64, 8, 16
BURST = 20
"""The sample whose batch, the third one, has a gradient that fp16 does not hold."""
BUSY = 200_000_000
"""Cycles for which the device is kept busy: a tenth of a second, in which the host does all that it has to."""


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As torchrun starts a single process."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    yield
    torch.cuda.empty_cache()


class Net(nn.Module):
    """Has parameters of the root and of a unit that FSDP gathers by itself."""

    def __init__(self, dropout: float = 0.0, sums: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(32, 3)
        self._sums = sums

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(inputs))
        return scores

    def training_step(self, batch: list[Tensor]) -> Tensor | Loss:
        inputs, labels = batch
        if self._sums:
            return Loss(F.cross_entropy(self(inputs), labels, reduction="sum"), (labels + 1).sum())
        return F.cross_entropy(self(inputs), labels)


def data() -> TensorDataset:
    inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, torch.arange(SAMPLES) % 3)


class Seen(Callback):
    """What there is while the run has its process group: losses of steps, weights and averages at its end."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.weights: dict[str, Tensor] = {}
        self.averages: dict[str, Tensor] = {}
        self.backends: set[str] = set()

    def on_fit_start(self, fit: Fit) -> None:
        if dist.is_initialized():
            self.backends = set(dist.get_backend_config().split(","))

    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        self.losses.append(loss.clone())

    def on_fit_end(self, fit: Fit) -> None:
        self.weights = {name: whole(each).detach().cpu().clone() for name, each in fit.strategy.weights().items()}
        for callback in fit.trainer.callbacks:
            if isinstance(callback, EMA):
                self.averages = {name: whole(each).cpu().clone() for name, each in callback.averages.items()}


def trained(module: Any = None, *callbacks: Callback, **options: Any) -> tuple[Fit, Seen]:
    os.environ["MASTER_PORT"] = str(free_port())
    seen = Seen()
    settings: dict[str, Any] = {
        "optimizer": partial(torch.optim.AdamW, lr=0.02),
        "train": Loader(data(), BATCH, shuffle=False),
        "max_duration": "12st",
        "strategy": "single",
        **options,
    }
    module = Net() if module is None else module
    return Trainer(module=module, callbacks=[*callbacks, seen], device="cuda", **settings).fit(), seen


def assert_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(dict(one), dict(other), rtol=0, atol=0)


def assert_close(one: Mapping[str, Tensor], other: Mapping[str, Tensor], tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(dict(one), dict(other), rtol=tolerance, atol=tolerance)


# Logged values


class Kept(Tracker):
    """Reads no value before the end."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def open(self, context: RunContext) -> None:
        pass

    def log(self, values: Any, step: int) -> None:
        self.rows.append(values)

    def close(self, outcome: str) -> None:
        pass

    def numbers(self, name: str) -> list[float]:
        rows = [row for row in self.rows if name in row]
        for row in rows:
            row.wait()
        return [float(row[name]) for row in rows]


class Overwriting(Callback):
    """Logs values that the device computes later than they are logged, and overwrites them at once."""

    def __init__(self) -> None:
        self.waited: list[bool] = []

    def on_fit_start(self, fit: Fit) -> None:
        self.values = torch.zeros(2, device="cuda", requires_grad=True)

    @torch.no_grad()
    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        torch.cuda._sleep(BUSY)
        self.values.fill_(fit.state.step)
        fit.log({"view": self.values[1], "double": self.values[0].double() / 3})
        self.values.fill_(-1.0)
        self.waited.append(torch.cuda.current_stream().query())


def test_a_value_on_the_device_is_logged_as_it_was_and_without_waiting_for_it(tmp_path: Path) -> None:
    kept, overwriting = Kept(), Overwriting()
    trackers = [kept, JsonLines(tmp_path / "rows")]

    trained(None, overwriting, trackers=trackers, max_duration="3st", log_every=None)

    assert overwriting.waited == [False] * 3
    assert kept.numbers("view") == [1.0, 2.0, 3.0]
    assert kept.numbers("double") == [1 / 3, 2 / 3, 1.0]
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["view"] for row in rows if "view" in row] == [1.0, 2.0, 3.0]


# The loop and the device


class Strict(Callback):
    """Lets every operation that waits for the device raise an error, for four steps, which make two updates."""

    def on_step_start(self, fit: Fit, batch: Any) -> None:
        if fit.state.step == 2:
            torch.cuda.set_sync_debug_mode("error")
        if fit.state.step == 6:
            torch.cuda.set_sync_debug_mode("default")

    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        fit.log({"loss": loss})


def cosine(optimizer: torch.optim.Optimizer, totals: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, totals.updates)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_no_step_waits_for_the_device(strategy: str, precision: str) -> None:
    try:
        trained(
            Net(dropout=0.1),
            EMA(0.9),
            Strict(),
            strategy=strategy,
            precision=precision,
            accumulate=2,
            clip_norm=1.0,
            schedule=cosine,
            trackers=[Kept()],
            log_every=None,
            max_duration="8st",
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Number formats


class Scaled(Callback):
    """Weights and the loss scale after each update."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.scales: list[float] = []

    def on_update_end(self, fit: Fit) -> None:
        self.weights.append({name: p.detach().clone() for name, p in fit.module.named_parameters()})
        assert fit.strategy.precision.scaler is not None
        self.scales.append(fit.strategy.precision.scaler.get_scale())


class Bursting(Net):
    """Its gradient is too large for fp16 where a batch has a certain sample."""

    def training_step(self, batch: list[Tensor]) -> Tensor:
        inputs, labels = batch
        factor = torch.where((inputs == 50.0).any(), 1e6, 1.0)
        return F.cross_entropy(self(inputs), labels) * factor


def test_fp16_leaves_out_an_update_that_overflows_and_a_resumed_run_keeps_the_scale(tmp_path: Path) -> None:
    bursting = data()
    bursting.tensors[0][BURST, 0] = 50.0
    options: dict[str, Any] = {"precision": "fp16", "train": Loader(bursting, BATCH, shuffle=False)}
    scaled = Scaled()

    fit, seen = trained(Bursting(), scaled, max_duration="7st", **options)
    policy = Checkpoints(folder=tmp_path, every=None)
    trained(Bursting(), max_duration="5st", checkpoints=policy, **options)
    resumed, again = trained(Bursting(), max_duration="7st", checkpoints=policy, **options)

    assert fit.state.skipped == 1
    assert scaled.scales == [2.0**16] * 2 + [2.0**15] * 5
    assert_equal(scaled.weights[1], scaled.weights[2])
    assert not torch.equal(scaled.weights[2]["head.bias"], scaled.weights[3]["head.bias"])
    assert resumed.resumed_step == 5
    assert resumed.strategy.precision.state_dict() == fit.strategy.precision.state_dict()
    assert_equal(again.weights, seen.weights)


def test_bf16_has_the_bits_of_a_loop_written_by_hand() -> None:
    _, seen = trained(precision="bf16")

    module = Net().cuda()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    inputs, labels = (each.cuda() for each in data().tensors)
    for step in range(12):
        rows = slice(step * BATCH % SAMPLES, step * BATCH % SAMPLES + BATCH)
        with torch.autocast("cuda", torch.bfloat16):
            loss: Any = module.training_step([inputs[rows], labels[rows]])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(seen.weights, {name: each.detach().cpu() for name, each in module.state_dict().items()})


# Memory


class Wide(nn.Module):
    """Needs 96 MiB and more for each row of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-1.0, 1.0, 2**23))
        self.rows: list[int] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.rows.append(len(batch[0]))
        return (batch[0] * self.scale).tanh().square().mean()


def peak_bytes(rows: int) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    module = Wide().cuda()
    module.training_step([torch.ones(rows, 1, device="cuda")]).backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved()


def test_a_batch_that_does_not_fit_is_halved_and_gives_the_gradient_of_the_whole() -> None:
    inputs = torch.linspace(0.1, 2.0, 16)[:, None]
    fits, does_not = peak_bytes(4), peak_bytes(8)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    module = Wide()
    torch.cuda.set_per_process_memory_fraction((fits + 0.6 * (does_not - fits)) / total)
    try:
        fit, seen = trained(
            module,
            optimizer=partial(torch.optim.SGD, lr=1e6),
            train=Loader(TensorDataset(inputs), 8, shuffle=False),
            max_duration="2st",
            out_of_memory="split",
        )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)

    assert module.rows == [8, 8, 4, 4, 4, 4]  # once more after what could be freed was freed, then never again
    assert fit.recovery is not None and fit.recovery.recovered == 1
    scale = Wide().scale.detach().double()
    for step in range(2):
        gradient = torch.zeros_like(scale)
        for x in inputs[step * 8 : step * 8 + 8].double():
            level = (x * scale).tanh()
            gradient += 2 * level * (1 - level.square()) * x / (8 * scale.numel())
        scale -= 1e6 * gradient
    torch.testing.assert_close(seen.weights["scale"].double(), scale, rtol=1e-4, atol=1e-5)


class Deep(nn.Module):
    """128 MiB in blocks of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2048, 2048, bias=False) for _ in range(8)])

    def training_step(self, batch: list[Tensor]) -> Tensor:
        hidden = batch[0]
        for block in self.blocks:
            hidden = block(hidden).tanh()
        return hidden.square().mean()


class Peak(Callback):
    """Memory that was taken at most until the module was made, in bytes."""

    def on_fit_start(self, fit: Fit) -> None:
        self.bytes = torch.cuda.max_memory_allocated() - self.before

    def begin(self) -> Peak:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()
        return self


def test_fsdp_takes_no_more_memory_for_initial_values_than_for_the_shard_and_a_block() -> None:
    peak = Peak().begin()

    _, seen = trained(
        Deep,
        peak,
        strategy="fsdp",
        optimizer=partial(torch.optim.SGD, lr=0.0),
        train=Loader(TensorDataset(torch.ones(8, 2048)), 8),
        max_duration="1st",
    )

    assert peak.bytes <= 1.2 * 2**27 + 2**24
    torch.manual_seed(0)
    assert seen.weights["blocks.0.weight"].std() == pytest.approx(1 / (3 * 2048) ** 0.5, rel=0.01)


# Strategies


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_process_over_nccl_ends_where_a_single_one_ends(strategy: str) -> None:
    options: dict[str, Any] = {"accumulate": 2, "clip_norm": 0.1}

    _, several = trained(Net(sums=True), strategy=strategy, **options)
    _, single = trained(Net(sums=True), **options)

    assert several.backends == {"cpu:gloo", "cuda:nccl"}
    assert_close(several.weights, single.weights)


def test_processes_that_share_a_device_are_told_how_many_may_start(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SHARING)
    count = torch.cuda.device_count()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count + 1), "script.py"]

    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert ended.returncode == 1
    error = f"InvalidSetup: ranks 0, {count} share a cuda device, and each needs its own: start {count} process"
    assert ended.stderr.count(error) == count + 1


class Terminated(Callback):
    """SIGTERM, once, within an accumulation window."""

    def __init__(self) -> None:
        self._done = False

    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        if fit.state.step == 7 and not self._done:
            self._done = True
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_run_with_dropout_resumes_with_the_same_bits(strategy: str, precision: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": strategy, "precision": precision, "accumulate": 2}
    policy = Checkpoints(folder=tmp_path, every="4st")
    _, uninterrupted = trained(Net(0.5), EMA(0.9), **options)

    terminated = Terminated()
    with pytest.raises(Interrupted):
        trained(Net(0.5), EMA(0.9), terminated, checkpoints=policy, **options)
    torch.cuda.manual_seed(99)
    resumed, again = trained(Net(0.5), EMA(0.9), terminated, checkpoints=policy, **options)

    assert resumed.resumed_step == 7
    assert_equal(again.weights, uninterrupted.weights)
    assert_equal(again.averages, uninterrupted.averages)
    assert torch.equal(torch.stack(again.losses), torch.stack(uninterrupted.losses[7:]))


def test_evaluations_of_averages_leave_no_trace_in_training_under_fsdp() -> None:
    evaluated = {"evaluate": Loader(data(), SAMPLES, shuffle=False), "evaluate_every": "1st"}

    plain, plainly = trained(None, EMA(0.9), strategy="fsdp")
    averaged, seen = trained(None, EMA(0.9), strategy="fsdp", **evaluated)
    single, alone = trained(None, EMA(0.9), **evaluated)

    assert torch.equal(torch.stack(seen.losses), torch.stack(plainly.losses))
    assert_equal(seen.weights, plainly.weights)
    assert_equal(seen.averages, plainly.averages)
    assert_close(seen.averages, alone.averages)
    assert averaged.results["val/loss"] == pytest.approx(single.results["val/loss"], rel=1e-5)
    assert not plain.results


@pytest.mark.skipif(shutil.which("cc") is None and shutil.which("gcc") is None, reason="torch.compile needs a compiler")
def test_a_compiled_module_ends_where_it_ends_without() -> None:
    _, compiled = trained(Net(), compile=True)
    _, plain = trained(Net())

    assert compiled.weights.keys() == plain.weights.keys()
    assert_close(compiled.weights, plain.weights, 1e-3)


# Data


class Numbered(Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2**16,), float(index))


class Means(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def training_step(self, batch: Tensor) -> Tensor:
        return (batch.mean() * self.weight).mean()


class Batches(Callback):
    """What the device reads of each batch, long after the next ones are on their way."""

    def __init__(self) -> None:
        self.read: list[Tensor] = []

    def on_step_start(self, fit: Fit, batch: Tensor) -> None:
        torch.cuda._sleep(BUSY // 20)
        self.read.append(batch.amin(1))
        self.read.append(batch.amax(1))


def test_batches_of_workers_come_over_page_locked_memory_and_arrive_as_they_were() -> None:
    loader, batches = Loader(Numbered(), BATCH, shuffle=False, num_workers=2), Batches()

    trained(Means(), batches, train=loader, max_duration="2ep", optimizer=partial(torch.optim.SGD, lr=0.0))

    numbers = torch.arange(float(SAMPLES)).view(-1, BATCH)
    for at, found in enumerate(batches.read):
        assert torch.equal(found.cpu(), numbers[at // 2 % len(numbers)])
    assert all(batch.is_pinned() for batch in loader.batches(0))
