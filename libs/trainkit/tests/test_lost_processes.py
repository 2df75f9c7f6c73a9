"""What becomes of the others when one process goes wrong: they end, and say why."""

from __future__ import annotations

import os
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainkit import Callback, Checkpoints, Trainer
from trainkit.data import Loader
from trainkit.errors import InvalidStep, NonFiniteLoss, OutOfMemory
from trainkit.loop.fit import Fit
from trainkit.strategies import DDP

KILLED = 9


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.calls = nn.Linear(4, 8), nn.Linear(8, 1), 0

    def training_step(self, batch: Any) -> Tensor:
        self.calls += 1
        return ((self.second(torch.tanh(self.first(batch[0]))) - 1) ** 2).mean()


def trained(**options: Any) -> Fit:
    inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))
    settings: dict[str, Any] = {
        "module": Net(),
        "optimizer": partial(torch.optim.AdamW, lr=0.01),
        "train": Loader(TensorDataset(inputs), 8),
        "max_duration": "2ep",
        "device": "cpu",
        "strategy": "ddp",
    }
    return Trainer(**{**settings, **options}).fit()


def rank() -> int:
    return int(os.environ["RANK"])


class Killed(Callback):
    """Takes one process away in the sixth step as SIGKILL does: its connections close, and it says nothing."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def on_step_start(self, fit: Fit, batch: Any) -> None:
        if fit.state.step == 5 and fit.strategy.rank == self._rank:
            os._exit(KILLED)


def one_is_killed(folder: str, strategy: str, which: int) -> None:
    policy = Checkpoints(folder=Path(folder) / "checkpoints", every="1st")
    trained(strategy=strategy, checkpoints=policy, callbacks=[Killed(which)])


@pytest.mark.parametrize(("strategy", "which"), [("ddp", 2), ("fsdp", 0)])
def test_the_others_end_when_one_of_four_is_killed_and_say_what_to_do(
    strategy: str, which: int, tmp_path: Path, forks: Any
) -> None:
    codes = forks.run(one_is_killed, tmp_path, processes=4, strategy=strategy, which=which)
    assert codes == [KILLED if at == which else 1 for at in range(4)]
    for at in range(4):
        said = (tmp_path / f"rank-{at}.log").read_text()
        assert ("Another process of this run ended before" in said) == (at != which), said


class Odd(Net):
    """The second process gets no number in its third step."""

    def training_step(self, batch: Any) -> Tensor:
        loss = super().training_step(batch)
        return loss * float("nan") if rank() == 1 and self.calls == 3 else loss


class Full(Net):
    """The second process has no room for a large tensor, from its fifth step on."""

    def training_step(self, batch: Any) -> Tensor:
        loss = super().training_step(batch)
        if rank() == 1 and self.calls >= 5:
            loss.backward()
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            taken = pages * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + 2**26, resource.RLIM_INFINITY))
            try:
                torch.empty(2**28)  # 1 GiB
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        return loss


class Spare(Net):
    """Has a layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


def trouble_of_one(folder: str) -> None:
    with pytest.raises(NonFiniteLoss, match="mean training loss up to step 10 is nan"):
        trained(module=Odd())
    for strategy in ("ddp", "fsdp"):
        fit = trained(module=Odd(), strategy=strategy, non_finite="skip")
        assert (fit.state.update, fit.state.skipped) == (24, 1)
    with pytest.raises(OutOfMemory, match="another process" if rank() == 0 else "a step does not fit into memory"):
        trained(module=Full(), out_of_memory="retry")


def unused(folder: str) -> None:
    module = Spare()
    before = module.first.weight.detach().clone()
    with pytest.raises(InvalidStep, match=r"no gradient for spare.weight, spare.bias, for which ddp waits: freeze"):
        trained(module=module, max_duration="1st")
    assert torch.equal(module.first.weight, before)
    for strategy in (DDP(find_unused=True), "fsdp"):
        assert trained(module=Spare(), strategy=strategy).state.step == 24


@pytest.mark.parametrize("case", [trouble_of_one, unused])
def test_all_processes_are_told_the_same(case: Any, tmp_path: Path, forks: Any) -> None:
    forks.succeed(case, tmp_path, processes=2)
