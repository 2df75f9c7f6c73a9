"""State that a module has beside its parameters, and state that it gives in another form: a resumed run continues
with all of it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainkit import Checkpoints, Trainer
from trainkit.checkpoints import export
from trainkit.data import Loader
from trainkit.errors import CheckpointError
from trainkit.sharded import whole

from libs.trainkit.tests.net import Net


class Copying(Net):
    """Gives copies of its weights as its state, as modules do that convert or rename them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self._copy)

    @staticmethod
    def _copy(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: Any) -> None:
        state.update({name: value.detach().clone() for name, value in state.items()})


class Unstored(Net):
    """Its input is centred by a mean that is no part of its state, with a table that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.zeros(6), persistent=False)
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.level.lerp_(batch[0].mean(0), 0.3)
        return super().training_step([batch[0] - self.level, batch[1]])


class Replacing(Net):
    """Replaces the tensor by another one, which grows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0), persistent=False)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.seen = torch.cat([self.seen, batch[0].mean()[None]])
        return super().training_step(batch) * (1 + self.seen.sum())


class Extra(Net):
    """Weights its loss by a number that it counts by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def training_step(self, batch: list[Tensor]) -> Tensor:
        self.count += 1
        return super().training_step(batch) * (1 + self.count / 10)

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


class ExtraTensor(Extra):
    def get_extra_state(self) -> Any:
        return torch.tensor(self.count)

    def set_extra_state(self, state: Any) -> None:
        self.count = int(state)


def trained(module: nn.Module, steps: int, folder: Path, strategy: str) -> dict[str, Tensor]:
    data = TensorDataset(torch.randn(32, 6, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 3)
    fit = Trainer(
        module=module,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        train=Loader(data, 8),
        max_duration=f"{steps}st",
        strategy=strategy,
        device="cpu",
        checkpoints=Checkpoints(folder=folder, every="5st"),
    ).fit()
    assert fit.resumed_step == (None if steps < 8 or folder.name == "whole" else 5)
    return {name: whole(each).detach().clone() for name, each in fit.module.named_parameters()}


KINDS: tuple[type[Net], ...] = (Copying, Unstored, Replacing, Extra, ExtraTensor)


def differences(kind: type[Net], folder: Path, strategy: str) -> Iterator[str]:
    """The parameters in which a resumed run ends elsewhere than one that was not interrupted."""
    folder = folder / f"{kind.__name__}-{strategy}"
    expected = trained(kind(), 8, folder / "whole", strategy)
    trained(kind(), 5, folder / "resumed", strategy)
    for name, each in trained(kind(), 8, folder / "resumed", strategy).items():
        if not torch.equal(each, expected[name]):
            yield name


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_all_state_of_a_module(kind: type[Net], tmp_path: Path) -> None:
    assert not list(differences(kind, tmp_path, "single"))


def two(folder: str) -> None:
    for strategy in ("ddp", "fsdp"):
        for kind in (Copying, Unstored, Extra):
            assert not list(differences(kind, Path(folder), strategy)), (kind, strategy)


def test_a_resumed_run_of_two_processes_has_it_too(tmp_path: Path, forks: Any) -> None:
    forks.succeed(two, tmp_path, processes=2)


def test_a_table_that_never_changes_is_not_stored(tmp_path: Path) -> None:
    trained(Unstored(), 5, tmp_path, "single")

    stored = (tmp_path / "step-5" / "index.json").read_text()
    assert "/buffers/level" in stored and "/buffers/table" not in stored


def test_a_type_that_no_checkpoint_holds_is_refused_before_training_and_rare_ones_are_stored(tmp_path: Path) -> None:
    wide, rare = Net(), Net()
    wide.register_buffer("table", torch.ones(2, dtype=torch.complex128))
    rare.register_buffer("table", torch.arange(3).to(torch.uint16))

    with pytest.raises(CheckpointError, match=r"table is complex128, and a checkpoint can hold bfloat16, .*: convert"):
        trained(wide, 5, tmp_path, "single")
    trained(rare, 5, tmp_path, "single")

    table = export.model(tmp_path / "step-5")["table"]
    assert table.dtype == torch.uint16 and table.tolist() == [0, 1, 2]
