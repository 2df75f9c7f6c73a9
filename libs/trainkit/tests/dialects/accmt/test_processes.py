"""Two processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset
from trainkit.callbacks.weights import load_weights
from trainkit.dialects.accmt.callbacks import Callback
from trainkit.dialects.accmt.metrics import Metric, MetricParallel
from trainkit.errors import OutOfMemory, TrainkitError

from libs.trainkit.tests.dialects.accmt.bowl import (
    Bowl,
    Layers,
    Swaps,
    apart,
    bowls,
    hps,
    logged,
    trainer,
)

# The module returns the values of a metric that most runs here do not have.
pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")


class Counts(Metric):
    wanted: list[float] | None = None

    def compute(self, predicted: Tensor, wanted: Tensor) -> dict[str, float]:
        self.wanted = wanted.tolist()
        return {"accuracy": float(len(predicted))}


class Mine(MetricParallel):
    def compute(self, predicted: Tensor, wanted: Tensor) -> dict[str, float]:
        import torch.distributed as dist

        return {"mine": 1.0 - 0.5 * dist.get_rank()}


class OnTwo(Bowl):
    """Logs in each step; the second process tries the last one twice."""

    failed = False

    def training_step(self, batch: Any) -> Tensor:
        import torch.distributed as dist

        rank = dist.get_rank()
        values = {"rank": torch.tensor(rank + 1.0), "plain": rank + 1.0}
        self.log(values, step=self.state.global_step + 1)
        self.log({"total": values["rank"]}, step=self.state.global_step + 1, reduction="sum")
        if rank == 1 and self.state.is_last_training_batch and not self.failed:
            self.failed = True
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().training_step(batch)

    def validation_step(self, key: str, batch: Any) -> Any:
        output = super().validation_step(key, batch)
        return {**output, "mine": output["accuracy"]}


class Full(Bowl):
    """The third step of the second process never fits into memory."""

    def training_step(self, batch: Any) -> Tensor:
        import torch.distributed as dist

        if dist.get_rank() == 1 and self.state.global_step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().training_step(batch)


class Detached(Bowl):
    def training_step(self, batch: Any) -> Tensor:
        return super().training_step(batch).detach()


def on_two_processes(folder: str) -> None:
    import torch.distributed as dist
    from trainkit.dialects.accmt.decorators import on_last_process, on_main_process

    rank, calls = dist.get_rank(), list[str]()

    def meet(name: str) -> None:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{name}.store", 2), rank=rank, world_size=2)

    class Guarded(Callback):
        def on_fit_start(self) -> None:
            calls.append("everywhere")
            on_main_process(lambda: calls.append("main"))()
            on_last_process(lambda: calls.append("last"))()

    place, counts = Path(folder) / "run", Counts("accuracy")
    made = trainer(
        place,
        hps(epochs=1),
        callback=Guarded(),
        metrics=[counts, Mine("mine")],
        destroy_after_training=False,
        shuffle_train=False,
    )
    module = OnTwo()
    targets = torch.arange(33.0)
    made.fit(module, apart(), TensorDataset(torch.ones(33), targets))
    assert dist.is_initialized()
    assert made.state.global_step == 6 and abs(module.w - (2 - 2 * 0.8**6)) < 1e-5
    states: list[Any] = [None, None]
    dist.all_gather_object(states, made.state.to_json())
    assert states[0] == states[1]
    assert calls == ["everywhere", "main" if rank == 0 else "last"]
    assert counts.wanted == (list(range(33)) if rank == 0 else None)
    assert abs(made.state.best_valid_loss - float(((module.w - targets) ** 2).mean())) < 1e-3
    # The first process has 16 rows of 33.
    expected = {"valid_loss": made.results["0/loss"], "accuracy": 33.0, "mine": (16 * 1.0 + 17 * 0.5) / 33}
    assert made.state.additional_metrics == {"0": expected}
    dist.barrier()  # the first process has written everything
    assert [logged(place, name) for name in ("rank", "total", "plain")] == [{6: 1.5}, {6: 3.0}, {6: 1.0}]
    assert (place / "best_valid_loss").is_dir()
    weights = load_weights(place / "best_valid_loss")
    assert list(weights) == ["w"] and abs(float(weights["w"]) - module.w) < 1e-6
    about = json.loads((place / "best_valid_loss" / "best.json").read_text())
    assert (about["step"], about["epoch"], about["values"]) == (6, 1, [made.state.best_valid_loss])
    for safe in (True, False):
        layers, options = Layers(), {"shuffle_train": False, "enable_checkpointing": False}
        made = trainer(
            Path(folder) / f"layers-{safe}",
            callback=Swaps(),
            safe_steps=safe,
            destroy_after_training=False,
            **options,
        )
        made.fit(layers, apart())
        late = 0.8**6 * (1 - 0.6**6)  # both weights go down the rest of the way for six steps, each half of it
        assert layers.weights == pytest.approx([2 - 2 * 0.8**6 + late, late], abs=1e-6)
    assert dist.is_initialized()
    trainer(Path(folder) / "again", hps(epochs=1)).fit(Bowl(), bowls(96), bowls(32))
    assert not dist.is_initialized()
    meet("failed")
    with pytest.raises(TypeError):
        trainer(Path(folder) / "failed", hps(epochs=1)).fit(Detached(), bowls(96))
    assert not dist.is_initialized()
    meet("full")
    with pytest.raises((TrainkitError, RuntimeError)) as raised:
        trainer(Path(folder) / "full", hps(epochs=1), enable_checkpointing=False).fit(Full(), bowls(96))
    problem = "a step does not fit into memory" if rank == 1 else "another process ran out of memory"
    assert raised.type is OutOfMemory and str(raised.value).startswith(problem)
    raise SystemExit(0)  # there is no group left that could be closed after this


@pytest.mark.spec("AC-009")
@pytest.mark.spec("AC-028")
@pytest.mark.spec("AC-037")
@pytest.mark.spec("AC-040")
@pytest.mark.spec("AC-056")
@pytest.mark.spec("AC-089")
@pytest.mark.spec("AC-069")
@pytest.mark.spec("AC-087")
@pytest.mark.spec("AC-088")
@pytest.mark.spec("AC-101")
@pytest.mark.spec("AC-105")
def test_two_processes_share_batches_metrics_and_logs(forks: Any, tmp_path: Path) -> None:
    forks.succeed(on_two_processes, tmp_path, processes=2)
