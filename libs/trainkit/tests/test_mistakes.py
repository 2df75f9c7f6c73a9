"""What goes wrong in the hands of a user: it is told before it costs anything, and nothing is silently another run."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset, IterableDataset
from trainkit import Callback, Checkpoints
from trainkit.callbacks import KeepBest
from trainkit.checkpoints import Best
from trainkit.checkpoints.folder import read_manifest
from trainkit.data import Loader
from trainkit.errors import CheckpointError, DamagedCheckpoint, InvalidSetup, InvalidStep, WrongCheckpoint
from trainkit.loop.fit import Fit
from trainkit.metrics import WholeSet

from libs.trainkit.tests.slope import Slope, ones, trainer
from scripts.testbed.ports import free_port


class Unshaped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(1)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.layer(batch[0][:, None]).mean()


class Still(Slope):
    def __init__(self) -> None:
        super().__init__()
        self.w.requires_grad_(False)


BEST = Checkpoints(folder="nowhere", best=Best(metric="val/acc"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"module": Unshaped()}, "layer.weight, layer.bias of Unshaped has no shape yet: send one batch through"),
        ({"module": Still()}, "nothing to train: no parameter of Still requires a gradient"),
        ({"evaluate": {"a": Loader(ones(0), 8)}}, r"evaluate\['a'\] is empty: give it at least one sample"),
        ({"evaluate": []}, "evaluate is empty"),
        ({"metrics": {"hits": 3}}, r"metrics\['hits'\] is a int: give a torchmetrics.Metric"),
        ({"metrics": {"hits": Slope}}, r"metrics\['hits'\] is a class \(Slope\), not an instance"),
        ({"checkpoints": BEST}, r"Checkpoints\(best=...\): nothing is evaluated"),
        ({"checkpoints": BEST, "evaluate": Loader(ones(8), 8)}, "no result is called 'val/acc'; there will be: val/lo"),
        ({"compile": True}, "compile: Slope has no forward, which is what is compiled"),
        ({"seed": 2**63}, "seed has to be a whole number of 64 bits"),
        ({"evaluate_first": "false"}, "evaluate_first has to be True or False, not 'false'"),
        ({"compile": "no"}, "compile='no': give True, False or a mapping"),
        ({"recompute": nn.Linear}, r"recompute=<class .*Linear'>: give a list of classes"),
        ({"schedule": partial(StepLR, step_size=3)}, r"torch's StepLR, .*: give lambda optimizer, totals: StepLR\("),
        ({"device": "gpu"}, "device='gpu': give for instance 'cpu', 'cuda' or 'cuda:1', or None"),
        ({"device": 3.5}, "device=3.5 is of the type float: give for instance 'cpu', 'cuda' or 'cuda:1', or None"),
        ({"device": ["cpu"]}, r"device=\['cpu'\] is of the type list: give for instance"),
        ({"device": "cuda:99"}, "device='cuda:99' is not available on this machine: .*; give for instance 'cpu'"),
        ({"device": "meta"}, "device='meta' is not available on this machine"),
        ({"precision": ["bf16"]}, r"precision=\['bf16'\]: choose one of fp32, bf16, fp16"),
        ({"precision": None}, "precision=None: choose one of fp32, bf16, fp16"),
        ({"precision": torch.bfloat16}, "precision=torch.bfloat16: choose one of fp32, bf16, fp16"),
        ({"non_finite": ["skip"]}, r"non_finite=\['skip'\]: choose one of raise, skip, ignore"),
    ],
)
def test_what_cannot_work_is_refused_before_training(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetup, match=message):
        trainer(**options).fit()


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(8))

    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": None}, "dataset is a NoneType"),
        ({"dataset": Stream}, "dataset is a class Stream, not an instance"),
        ({"batch_size": math.nan}, "batch_size=nan has to be a whole number of at least 1"),
        ({"batch_size": "8"}, "batch_size='8' has to be"),
        ({"batch_size": 0}, "batch_size=0 has to be"),
        ({"prefetch": True}, "prefetch=True has to be"),
        ({"num_workers": -1}, "num_workers=-1 has to be a whole number from 0 to 1024"),
        ({"num_workers": 10**6}, "num_workers=1000000 has to be"),
        ({"shuffle": "no"}, "shuffle has to be True or False, not 'no'"),
        ({"collate": "pad"}, "collate is a str: give a function, or None"),
    ],
)
def test_a_loader_is_told_what_it_can_work_with(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetup, match=message):
        Loader(**{"dataset": ones(8), "batch_size": 4, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"best": "val/loss"}, r"best='val/loss': give Best\(metric=...\)"),
        ({"keep_last": 1.5}, "keep_last has to be a whole number of at least 1, not 1.5"),
        ({"keep_last": 0}, "keep_last has to be"),
        ({"grace_s": math.nan}, "grace_s has to be a number of seconds greater than 0, not nan"),
        ({"grace_s": "30s"}, "grace_s has to be a number of seconds greater than 0, not '30s'"),
        ({"at_end": "false"}, "at_end has to be True or False, not 'false'"),
        ({"folder": 3}, "folder=3: give a path, or None"),
    ],
)
def test_a_policy_that_would_fail_at_its_first_checkpoint_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSetup, match=message):
        Checkpoints(**options)


def test_a_metric_cannot_be_called_as_the_loss_is() -> None:
    class Mean(WholeSet):
        def score(self, rows: Tensor) -> Tensor:
            return rows.mean()

    with pytest.raises(InvalidSetup, match="a metric is called 'loss'"):
        trainer(evaluate=Loader(ones(8), 8), metrics={"loss": Mean()}).fit()


def test_a_loss_without_a_gradient_is_told_where_it_comes_from() -> None:
    class Detached(Slope):
        def training_step(self, batch: list[Tensor]) -> Any:
            return super().training_step(batch).detach()

    with pytest.raises(InvalidStep, match="training_step returned a loss without a gradient"):
        trainer(module=Detached()).fit()


def test_a_deterministic_run_refuses_what_is_not_and_leaves_the_program_as_it_was() -> None:
    class Put(Slope):
        def training_step(self, batch: list[Tensor]) -> Any:
            device = self.w.device
            twice = torch.zeros(3, device=device).put_(torch.tensor([0, 0], device=device), self.w.expand(2))
            return super().training_step(batch) + twice.sum()

    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        trainer(module=Put(), deterministic=True).fit()
    assert not torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        trainer(max_duration="1st").fit()
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Tensor:
        if index == 50:
            raise KeyError("no file number 50")
        return torch.ones(())


def test_an_error_of_a_dataset_ends_the_run_whichever_process_reads_it() -> None:
    for workers in (0, 2):
        with pytest.raises(KeyError, match="no file number 50"):
            trainer(train=Loader(Broken(), 8, num_workers=workers)).fit()


def test_the_memory_of_the_host_counts_as_the_device_s() -> None:
    class Greedy(Slope):
        calls = 0

        def training_step(self, batch: list[Tensor]) -> Any:
            self.calls += 1
            if self.calls == 3:
                raise MemoryError
            return super().training_step(batch)

    fit = trainer(module=Greedy(), out_of_memory="retry").fit()
    assert fit.module.w.item() == pytest.approx(2 - 2 * 0.8**24)


def test_evaluations_within_an_accumulation_window_change_nothing() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.body = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return ((self.body(batch[0][:, None]) - 2) ** 2).mean()

    def weights(every: str | None) -> dict[str, Tensor]:
        options = {"evaluate": Loader(ones(20), 8), "evaluate_every": every, "evaluate_last": False}
        fit = trainer(module=Deep(), accumulate=4, optimizer=partial(torch.optim.AdamW, lr=0.01), **options).fit()
        assert fit.state.evaluations == (24 if every else 0)
        return dict(fit.module.state_dict())

    often, never = weights("1st"), weights(None)
    assert all(torch.equal(often[name], never[name]) for name in never)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(1, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1))
        self.blocks = nn.ModuleList([inner])

    def training_step(self, batch: list[Tensor]) -> Any:
        return self.blocks[0](batch[0][:, None]).square().mean()


def test_fsdp_shards_units_within_units(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    assert trainer(module=Nested(), strategy="fsdp").fit().state.step == 24


# Going on from a checkpoint


class Extra(Slope):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(1, 1).requires_grad_(False)


def halved(optimizer: Any, totals: Any) -> StepLR:
    return StepLR(optimizer, 1, 0.5)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {"optimizer": partial(torch.optim.AdamW, lr=0.1)}, "state of SGD and this run has AdamW: go on with SGD"),
        ({"schedule": halved}, {}, "made with StepLR and this run has none: go on with the same"),
        ({}, {"schedule": halved}, "made with no schedule and this run has StepLR"),
        ({"module": Extra()}, {"module": Slope()}, "has spare.bias, spare.weight, which the module has not"),
        ({"module": Slope()}, {"module": Extra()}, "has no /model/spare"),
        (
            {"max_duration": "5st"},
            {"train": Loader(ones(50), 8)},
            "samples=96 in the checkpoint and 50 in this run.*'samples': 'accept'",
        ),
        (
            {"max_duration": "7st"},
            {"train": Loader(ones(50), 8), "on_change": {"samples": "accept"}},
            "after 56 of 96 samples in batches of 8; this run has 50 samples in batches of 8, and cannot continue",
        ),
    ],
    ids=["optimizer", "no schedule", "schedule", "weights gone", "new weights", "data", "less data"],
)
def test_a_run_of_something_else_does_not_go_on(before: Any, after: Any, message: str, tmp_path: Path) -> None:
    policy = Checkpoints(folder=tmp_path)
    trainer(checkpoints=policy, **{"max_duration": "1ep", **before}).fit()
    with pytest.raises(WrongCheckpoint, match=message):
        trainer(checkpoints=policy, **after).fit()


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(float(index))


class Seen(Slope):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[float] = []

    def training_step(self, batch: Tensor) -> Any:
        self.rows += batch.tolist()
        return super().training_step([torch.ones_like(batch)])


@pytest.mark.parametrize(("size", "again"), [(16, 8), (4, 0), (20, 0), (96, 40)])
def test_batches_of_another_size_go_on_at_the_same_sample(size: int, again: int, tmp_path: Path) -> None:
    policy, first, rest, whole = Checkpoints(folder=tmp_path), Seen(), Seen(), Seen()
    trainer(module=whole, train=Loader(Numbers(), 8), max_duration="1ep").fit()
    trainer(module=first, train=Loader(Numbers(), 8), max_duration="5st", checkpoints=policy).fit()
    accepted = {"checkpoints": policy, "on_change": {"batch_size": "accept"}}
    trainer(module=rest, train=Loader(Numbers(), size), max_duration="1ep", **accepted).fit()
    assert first.rows == whole.rows[:40]
    assert rest.rows == whole.rows[40 - again :]


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Path]:
    trainer(checkpoints=Checkpoints(folder=tmp_path)).fit()
    yield tmp_path


def test_a_run_does_not_begin_anew_over_checkpoints_that_are_all_damaged(checkpoints: Path) -> None:
    for file in checkpoints.glob("*/*.safetensors"):
        file.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"none of the 2 checkpoint\(s\) in .* is as it was written: bring them"):
        trainer(checkpoints=Checkpoints(folder=checkpoints)).fit()


@pytest.mark.parametrize("text", ["[]", "{}", '{"step": 24, "world_size": 1, "results": {}, "files": []}', "", "\0"])
def test_a_manifest_that_is_none_is_passed_over_with_a_warning(
    text: str, checkpoints: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (checkpoints / "step-24" / "manifest.json").write_text(text)
    assert trainer(checkpoints=Checkpoints(folder=checkpoints)).fit().resumed_step == 12
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert f"{checkpoints}/step-24: manifest.json cannot be read" in said
    assert f"The run resumes from {checkpoints}/step-12 instead" in said


@pytest.mark.parametrize(
    "lie",
    [
        {"turn": "x"},
        {"turn": None},
        {"step": -1},
        {"world_size": "1"},
        {"results": None},
        {"results": {"val/loss": "low"}},
        {"files": [{"name": "../step-12/state.json", "size": 1, "sha256": ""}]},
    ],
    ids=str,
)
def test_a_manifest_that_says_what_cannot_be_is_passed_over(lie: dict[str, Any], checkpoints: Path) -> None:
    manifest = checkpoints / "step-24" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **lie}))
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json cannot be read"):
        read_manifest(manifest.parent)
    assert trainer(checkpoints=Checkpoints(folder=checkpoints)).fit().resumed_step == 12


def test_a_folder_that_cannot_be_one_is_told_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidSetup, match=r"checkpoints cannot be written to .*file: .*; choose another folder"):
        trainer(checkpoints=Checkpoints(folder=tmp_path / "file")).fit()


UNWRITABLE = Path("/proc/self")
"""A folder in which not even root can make a file."""


def test_a_folder_that_cannot_be_written_is_found_before_training() -> None:
    module = Slope()
    with pytest.raises(InvalidSetup, match=r"checkpoints cannot be written to /proc/self: .*; choose another folder"):
        trainer(module=module, checkpoints=Checkpoints(folder=UNWRITABLE)).fit()
    with pytest.raises(InvalidSetup, match=r"KeepBest: /proc/self cannot be written: .*; give another folder"):
        trainer(module=module, callbacks=[KeepBest(folder=UNWRITABLE / "best")], evaluate=Loader(ones(8), 8)).fit()
    assert module.w == 0


def one_cannot_write(folder: str) -> None:
    place = UNWRITABLE if os.environ["RANK"] == "1" else Path(folder)
    with pytest.raises(InvalidSetup, match=r"checkpoints cannot be written to .* by rank 1: .*; choose another"):
        trainer(strategy="ddp", checkpoints=Checkpoints(folder=place)).fit()


def test_all_processes_end_before_training_when_one_cannot_write(tmp_path: Path, forks: Any) -> None:
    forks.succeed(one_cannot_write, tmp_path, processes=2)


class Parts(Slope):
    """Parts of it are in evaluation mode from the beginning, or by the hand of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.trained, self.frozen, self.late = nn.BatchNorm1d(2), nn.BatchNorm1d(2).eval(), nn.BatchNorm1d(2)
        self.own = nn.BatchNorm1d(2)
        self.pretrained = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)).eval()
        self.seen: list[tuple[bool, ...]] = []

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.own.training = False
        return self

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.seen.append((self.training, self.trained.training, *self.kept()))
        return super().training_step(batch)

    def kept(self) -> list[bool]:
        return [part.training for part in (self.frozen, self.late, self.own, self.pretrained[1])]


class Freezing(Callback):
    def on_fit_start(self, fit: Fit) -> None:
        fit.module.late.eval()


def test_parts_in_evaluation_mode_stay_so_in_training_and_after_an_evaluation(caplog: pytest.LogCaptureFixture) -> None:
    module = Parts()
    trainer(module=module, evaluate=Loader(ones(8), 8), evaluate_every="2st", callbacks=[Freezing()]).fit()
    training = [seen for seen in module.seen if seen[0]]
    assert len(training) == 24 and set(training) == {(True, True, False, False, False, False)}
    assert module.kept() == [False] * 4 and module.training
    (said,) = [record.getMessage() for record in caplog.records if "evaluation mode" in record.getMessage()]
    assert "pretrained is in evaluation mode" in said


def test_a_module_in_evaluation_mode_is_trained_as_a_whole() -> None:
    module = Parts().eval()
    trainer(module=module, max_duration="1st").fit()
    assert module.seen == [(True, True, True, True, False, True)]
