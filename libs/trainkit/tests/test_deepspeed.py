"""DeepSpeed's stages end where one process ends, and resume with the bits of a run that was not interrupted."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import TensorDataset
from trainkit import Callback, Checkpoints, Loss, Trainer
from trainkit.callbacks import EMA, WatchGradients
from trainkit.checkpoints.export import model
from trainkit.data import Loader
from trainkit.errors import InvalidSetup, InvalidStep, WrongCheckpoint
from trainkit.loop.fit import Fit
from trainkit.optim import Group, optimizer
from trainkit.strategies import DeepSpeed, strategy

TOLERANCE = {"fp32": 1e-6, "bf16": 5e-3}
STAGES = (0, 1, 2, 3)


class Net(nn.Module):
    """Has a parameter of its own beside those of its parts."""

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


class Exploding(Net):
    """Its loss is not a number in the fifth step."""

    steps = 0

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.steps += self.training
        return super().training_step(batch) * (float("nan") if self.steps == 5 else 1.0)


def data(samples: int = 26) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 5, generator=generator), torch.arange(samples) % 3)


def trained(kind: type[nn.Module] = Net, **options: Any) -> Fit:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "optimizer": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
        "schedule": lambda optimizer, totals: CosineAnnealingLR(optimizer, 12),
        "train": Loader(data(), batch_size=8),
        "evaluate": Loader(data(11), batch_size=4, shuffle=False),
        "max_duration": "3ep",
        "accumulate": 3,
        "clip_norm": 0.5,
        **options,
    }
    return Trainer(module=kind(), **settings).fit()


def zero(stage: int) -> DeepSpeed:
    return DeepSpeed(stage=stage, persist_below=4)  # type: ignore[arg-type]


def found(fit: Fit) -> dict[str, Any]:
    return {
        "weights": {name: weight.reshape(-1).tolist() for name, weight in fit.strategy.weights().items()},
        "results": fit.results,
        "tokens": fit.state.tokens,
        "skipped": fit.state.skipped,
        "norm": float(fit.grad_norm) if fit.grad_norm is not None else None,
    }


class Halving(Callback):
    """Halves all weights after the second update."""

    def on_update_end(self, fit: Fit) -> None:
        if fit.state.update == 2:
            with fit.strategy.writing_weights() as parameters:
                for p in parameters.values():
                    p.mul_(0.5)


class Replacing(Callback):
    """Gives a parameter other memory, which the pieces of stages 1 and 2 do not know of."""

    def on_update_end(self, fit: Fit) -> None:
        fit.module.scale.data = torch.zeros(1)
        fit.strategy.weights_changed()


CASES: dict[str, dict[str, Any]] = {
    "Net": {},
    "Counting": {"kind": Counting},
    "bf16": {"precision": "bf16"},
    "Exploding": {"kind": Exploding, "non_finite": "skip", "log_every": None},
    "Halving": {"callbacks": [Halving()]},
    "EMA": {"callbacks": [EMA(0.5)], "evaluate_every": "2st"},
}


class Halved(Net):
    """Has its weights in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)


class Own(torch.optim.AdamW):
    """Nobody knows what it looks at."""


REFUSED: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "fp16"},
    "stage 0": {"optimizer": partial(Own, lr=0.01)},
    "use 'raise'": {"out_of_memory": "split"},
    "EMA": {"callbacks": [EMA()]},
    "WatchGradients": {"callbacks": [WatchGradients()]},
    "recompute": {"recompute": [nn.Tanh]},
    "compile": {"compile": True},
    "32 bits": {"kind": Halved},
}


def cases(stage: int) -> dict[str, dict[str, Any]]:
    """Those that a stage can do."""
    return {name: options for name, options in CASES.items() if stage < 3 or name != "EMA"}


def several(folder: str) -> None:
    """All cases on all stages, each stage interrupted and gone on with, and what is refused."""
    everything: dict[str, Any] = {}
    for stage in STAGES:
        for name, options in cases(stage).items():
            everything[f"{stage} {name}"] = found(trained(strategy=zero(stage), **options))
        everything[f"{stage} resumed"] = resumed(stage, Path(folder, f"stage-{stage}"))
    with pytest.raises(InvalidStep, match="scale was given other memory"):
        trained(strategy=zero(1), callbacks=[Replacing()])
    for stage in (0, 2, 3):
        changed_rates(stage, Path(folder, f"changed-{stage}"))
    for name, options in REFUSED.items():
        with pytest.raises(InvalidSetup, match=name):
            trained(strategy=zero(3), **options)
    Path(folder, f"found-{torch.distributed.get_rank()}").write_text(json.dumps(everything))


def resumed(stage: int, folder: Path) -> dict[str, Any]:
    checkpoints = Checkpoints(folder=folder, every="1ep")
    trained(strategy=zero(stage), checkpoints=checkpoints, max_duration="1ep")
    fit = trained(strategy=zero(stage), checkpoints=checkpoints)
    assert fit.resumed_step == 4
    return found(fit)


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_step_start(self, fit: Fit, batch: Any) -> None:
        self.seen.append([float(group["lr"]) for group in fit.optimizer.param_groups])


def changed_rates(stage: int, folder: Path) -> None:
    """The code's rates, decay and duration count in a run that resumes, and other groups are an error."""

    def run(rate: float, decay: float, length: str, **options: Any) -> None:
        made = optimizer("AdamW", lr=rate, weight_decay=decay, groups=[Group("scale", {"lr": rate / 2})])
        longer = {"schedule": lambda made, totals: CosineAnnealingLR(made, totals.updates), "max_duration": length}
        trained(**{"strategy": zero(stage), "optimizer": made, **longer, **options})

    rates, whole = Rates(), Rates()
    checkpoints = Checkpoints(folder=folder)
    run(0.02, 0.1, "1ep", checkpoints=checkpoints)
    run(0.01, 0.3, "2ep", checkpoints=checkpoints, callbacks=[rates])
    run(0.01, 0.3, "2ep", callbacks=[whole])
    assert rates.seen == whole.seen[4:] and 2 * rates.seen[0][0] == rates.seen[0][1]
    with pytest.raises(WrongCheckpoint, match="other parameters or groups"):
        run(0.01, 0.3, "3ep", checkpoints=checkpoints, optimizer=partial(torch.optim.AdamW, lr=0.01))


def test_stages_end_where_one_process_ends_and_resume_with_the_same_bits(tmp_path: Path, forks: Any) -> None:
    forks.succeed(several, tmp_path, processes=2)

    expected = {name: found(trained(**options)) for name, options in CASES.items()}
    for rank in range(2):
        everything = json.loads((tmp_path / f"found-{rank}").read_text())
        for stage in STAGES:
            assert everything[f"{stage} resumed"] == everything[f"{stage} Net"]
            for name in cases(stage):
                assert_close(
                    everything[f"{stage} {name}"], expected[name], TOLERANCE[CASES[name].get("precision", "fp32")]
                )
            stored = model(tmp_path / f"stage-{stage}" / "step-12")
            assert {name: each.reshape(-1).tolist() for name, each in stored.items()} == (
                everything[f"{stage} Net"]["weights"]
            )
    assert expected["Exploding"]["skipped"] == 1


def assert_close(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> None:
    assert list(ours["weights"]) == list(theirs["weights"])
    for name, weight in theirs["weights"].items():
        assert ours["weights"][name] == pytest.approx(weight, abs=tolerance, rel=tolerance)
    assert ours["results"] == pytest.approx(theirs["results"], abs=10 * tolerance)
    assert ours["norm"] == pytest.approx(theirs["norm"], rel=10 * tolerance)
    assert (ours["tokens"], ours["skipped"]) == (theirs["tokens"], theirs["skipped"])


def test_a_stage_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidSetup, match="choose 0, 1, 2 or 3"):
        DeepSpeed(stage=4)  # type: ignore[arg-type]


def test_the_word_takes_stage_two() -> None:
    chosen = strategy("deepspeed")

    assert isinstance(chosen, DeepSpeed)
    assert chosen.stage == 2
