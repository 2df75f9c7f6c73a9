"""Loaders that a module makes itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate
from trainkit.data.feed import feed
from trainkit.dialects.accmt.loaders import adopted

from libs.trainkit.tests.dialects.accmt.bowl import Numbers, Ordered, Stop, bowls, fitted, hps, trainer

# The module returns the values of a metric that the runs here do not have.
pytestmark = pytest.mark.filterwarnings("ignore:validation_step returned")

BACKWARDS = range(94, -1, -1)


def shifted(samples: Any) -> Any:
    inputs, wanted, index = default_collate(samples)
    return inputs, wanted, index + 1000


def backwards(**options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(), batch_size=4, sampler=BACKWARDS, collate_fn=shifted, drop_last=True, **options)


@pytest.mark.spec("AC-080")
def test_a_module_s_loaders_are_used_as_they_are(tmp_path: Path) -> None:
    class Own(Ordered):
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[Any] = []
            self.evaluated: list[int] = []

        def get_train_dataloader(self, dataset: Any) -> Any:
            self.asked.append(dataset)
            return backwards()

        def get_validation_dataloader(self, dataset: Any) -> Any:
            self.asked.append(dataset)
            return DataLoader(dataset or Numbers(), batch_size=40, shuffle=False)

        def validation_step(self, key: str, batch: Any) -> Any:
            self.evaluated.append(len(batch[0]))
            return super().validation_step(key, batch)

    options: dict[str, Any] = {"enable_checkpointing": False, "disable_model_saving": True}
    module, train, val = Own(), bowls(8), bowls(48)
    made, _ = fitted(tmp_path / "given", hps(epochs=1), module=module, train=train, val=val, **options)
    assert module.asked[0] is train and module.asked[1] is val and len(module.asked) == 2
    # 95 samples in batches of 4: the last 3 are dropped.
    assert module.order == [1000 + index for index in BACKWARDS[:92]] and made.state.global_step == 23
    assert module.evaluated == [40, 8]
    module = Own()
    trainer(tmp_path / "none", hps(epochs=1), **options).fit(module)
    assert module.asked == [None, None] and module.evaluated == [40, 40, 16] and len(module.order) == 92


@pytest.mark.spec("AC-080")
def test_batches_of_a_module_s_loader_are_moved_to_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Ordered):
        def get_train_dataloader(self, dataset: Any) -> Any:
            return backwards()

        def training_step(self, batch: Any) -> Any:
            self.keys += [part.device.type for part in batch]
            raise Stop

    # A device that is not the CPU and that every machine has: its tensors have shapes and no values.
    monkeypatch.setattr("trainkit.strategies.base.chosen", lambda device, local_rank: torch.device("meta"))
    module = Own()
    with pytest.raises(Stop):
        fitted(tmp_path, module=module, val=None, log_every=None, enable_checkpointing=False, safe_steps=False)
    assert module.keys == ["meta"] * 3


@pytest.mark.spec("AC-080")
def test_a_module_s_loader_is_divided_among_processes() -> None:
    def order(rank: int) -> list[list[int]]:
        part = feed(adopted(backwards(), 2))
        part.bind(seed=0, rank=rank, world_size=2, device=torch.device("cpu"))
        return [batch[2].tolist() for batch in part.batches(0)]

    first, second = order(0), order(1)
    # Each process has 4 samples a step, as the loader says.
    assert [len(batch) for batch in first] == [len(batch) for batch in second] == [4] * 11
    together = [index - 1000 for pair in zip(first, second, strict=True) for batch in pair for index in batch]
    assert together == list(BACKWARDS[:88])
