"""Where batches come from."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import trainkit.data.loader
from torch import Tensor
from torch.utils.data import DataLoader, SubsetRandomSampler
from trainkit.dialects.accmt.loaders import train_loader

from libs.trainkit.tests.dialects.accmt.bowl import (
    Bowl,
    Numbers,
    Ordered,
    Rows,
    bowls,
    fitted,
    hps,
    logged,
    trainer,
)

# The module returns the values of a metric that most runs here do not have.
pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")


class Drawing(Ordered):
    """Draws random numbers as it trains, and notes the order of the validation data."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[int] = []

    def training_step(self, batch: Any) -> Tensor:
        torch.rand(3)
        return super().training_step(batch)

    def validation_step(self, key: str, batch: Any) -> Any:
        self.validated += batch[2].tolist()
        return super().validation_step(key, batch)


class Validating(Bowl):
    def get_validation_dataloader(self, dataset: Any) -> Any:
        return DataLoader(bowls(20) if dataset is None else dataset, batch_size=4)


class Own(Bowl):
    def get_train_dataloader(self, dataset: Any) -> Any:
        return DataLoader(bowls(40) if dataset is None else dataset, batch_size=8 if dataset is None else 3)


@pytest.mark.spec("AC-007")
@pytest.mark.spec("AC-008")
@pytest.mark.spec("AC-064")
@pytest.mark.spec("AC-080")
def test_a_module_brings_its_own_loader(tmp_path: Path) -> None:
    made = trainer(tmp_path / "a", hps(epochs=1))
    made.fit(Own())
    assert made.state.global_step == 5
    assert logged(tmp_path / "a", "val_loss") == {}
    assert (tmp_path / "a" / "best_train_loss").is_dir() and not (tmp_path / "a" / "best_valid_loss").exists()
    made, _ = fitted(tmp_path / "b", hps(epochs=1), module=Own())
    assert made.state.global_step == 32
    with pytest.raises(ValueError, match="no training data"):
        trainer(tmp_path / "c").fit(Bowl())


@pytest.mark.spec("AC-008")
def test_a_module_brings_its_own_validation_loader_also_without_validation_data(tmp_path: Path) -> None:
    for at, (val, batches) in enumerate(((None, 5), (bowls(32), 8), ([bowls(32), bowls(8)], 10))):
        _, module = fitted(tmp_path / str(at), hps(epochs=1), module=Validating(), val=val)
        assert len(module.keys) == batches
    assert module.keys == ["0"] * 8 + ["1"] * 2
    _, module = fitted(tmp_path / "by key", hps(epochs=1), val={"a": bowls(8), "b": bowls(16)})
    assert module.keys == ["a", "b", "b"]
    assert list(logged(tmp_path / "0", "val_loss")) == [12] and (tmp_path / "0" / "best_valid_loss").is_dir()


@pytest.mark.spec("AC-014")
def test_every_epoch_has_its_own_order_and_every_run_the_same(tmp_path: Path) -> None:
    modules = [Ordered(), Drawing()]
    val = [None, Numbers()]
    orders = [fitted(tmp_path / str(at), module=modules[at], train=Numbers(), val=val[at])[1].order for at in range(2)]
    first, second = orders[0][:96], orders[0][96:]
    assert orders[0] == orders[1] and first != second
    assert sorted(first) == sorted(second) == list(range(96))
    _, plain = fitted(tmp_path / "p", hps(epochs=1), module=Ordered(), train=Numbers(), shuffle_train=False)
    assert plain.order == list(range(96))
    assert modules[1].validated == [*range(96)] * 2


@pytest.mark.spec("AC-015")
def test_samplers_are_taken_one_after_the_other(tmp_path: Path) -> None:
    samplers = [SubsetRandomSampler(range(10)), SubsetRandomSampler(range(50, 70))]
    _, module = fitted(tmp_path, module=Ordered(), train=Numbers(), sampler=samplers)
    first, second = module.order[:30], module.order[30:]
    assert sorted(first[:10]) == list(range(10)) and sorted(first[10:]) == list(range(50, 70))
    assert first != second and sorted(first) == sorted(second)
    options: dict[str, Any] = {"enable_checkpointing": False, "train": Numbers(), "sampler": samplers}
    _, again = fitted(tmp_path, module=Drawing(), val=None, **options)
    assert again.order == module.order
    _, one = fitted(tmp_path, hps(epochs=1), module=Ordered(), **{**options, "sampler": samplers[0]})
    assert sorted(one.order) == list(range(10))
    parts = [train_loader(Bowl(), Numbers(), trainer(tmp_path, sampler=samplers).settings, 8, 2) for _ in range(2)]
    halves = []
    for rank, part in enumerate(parts):
        part.bind(seed=0, rank=rank, world_size=2, device=torch.device("cpu"))
        halves.append([index for batch in part.batches(0) for index in batch[2].tolist()])
    assert sorted([*halves[0], *halves[1]]) == sorted(first) and abs(len(halves[0]) - len(halves[1])) <= 1


@pytest.mark.spec("AC-016")
def test_collate_functions_serve_one_loader_or_both(tmp_path: Path) -> None:
    calls = {"train": 0, "val": 0}

    def spy(name: str) -> Any:
        def collate(samples: Any) -> Any:
            calls[name] += 1
            return torch.utils.data.default_collate(samples)

        return collate

    fitted(tmp_path, hps(epochs=1), collate_fn_train=spy("train"), collate_fn_val=spy("val"))
    assert calls == {"train": 12, "val": 4}
    fitted(tmp_path / "one", hps(epochs=1), collate_fn_train=spy("train"))
    assert calls == {"train": 24, "val": 4}
    fitted(tmp_path / "both", hps(epochs=1), collate_fn=spy("val"))
    assert calls == {"train": 24, "val": 4 + 12 + 4}
    for specific in ("collate_fn_train", "collate_fn_val"):
        with pytest.raises(ValueError, match="collate_fn serves both"):
            trainer(tmp_path, collate_fn=spy("train"), **{specific: spy("train")})


@pytest.mark.spec("AC-019")
def test_only_training_drops_an_incomplete_batch(tmp_path: Path) -> None:
    for drop, steps in ((False, 13), (True, 12)):
        rows = Rows()
        made, _ = fitted(
            tmp_path / str(drop),
            hps(epochs=1),
            train=bowls(100),
            val=bowls(33),
            metrics=rows,
            dataloader_drop_last=drop,
        )
        assert made.state.global_step == steps and rows.rows == [33]


@pytest.mark.spec("AC-017")
def test_memory_is_page_locked_only_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    made = trainkit.data.loader.DataLoader

    def noted(*given: Any, **options: Any) -> Any:
        asked.append(options["pin_memory"])
        return made(*given, **{**options, "pin_memory": False})

    monkeypatch.setattr(trainkit.data.loader, "DataLoader", noted)
    fitted(tmp_path, hps(max_steps=1), enable_checkpointing=False)
    assert set(asked) == {torch.cuda.is_available()}
    asked.clear()
    fitted(tmp_path, hps(max_steps=1), enable_checkpointing=False, dataloader_pin_memory=False)
    assert set(asked) == {False}
    for pin in (True, False):
        loader: Any = train_loader(Bowl(), bowls(8), trainer(tmp_path, dataloader_pin_memory=pin).settings, 8, 1)
        assert loader.pins(torch.device("cuda")) is pin


@pytest.mark.spec("AC-020")
def test_batches_are_moved_to_the_device_unless_that_is_the_module_s_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Placed(Bowl):
        devices: list[str]

        def training_step(self, batch: Any) -> Tensor:
            self.devices = [each.device.type for each in (batch[0], batch[1]["deep"][0])]
            return (self.model.w * batch[0].to(self.model.w.device)).mean()

    # A device that is not the CPU and that every machine has: its tensors have shapes and no values.
    monkeypatch.setattr("trainkit.strategies.base.chosen", lambda device, local_rank: torch.device("meta"))
    data = [(torch.ones(()), {"deep": [torch.ones(())]})] * 8
    for placed, device in ((True, "meta"), (False, "cpu")):
        module = Placed()
        options: dict[str, Any] = {
            "enable_checkpointing": False,
            "disable_model_saving": True,
            "log_every": None,
            "safe_steps": False,
        }
        with contextlib.suppress(RuntimeError, NotImplementedError):  # the run ends with numbers, which there are not
            fitted(
                tmp_path / device,
                hps(max_steps=1),
                module=module,
                train=data,
                val=None,
                batch_device_placement=placed,
                **options,
            )
        assert module.devices == [device, device]
