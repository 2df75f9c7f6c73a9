"""Parameters that are frozen and unfrozen while a run trains are trained as torch trains them, on every strategy."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainkit import Callback, Trainer
from trainkit.data import Loader
from trainkit.errors import InvalidSetup, InvalidStep
from trainkit.loop.fit import Fit
from trainkit.precision import Precision
from trainkit.sharded import whole
from trainkit.strategies import DDP, FSDP

from libs.trainkit.tests.net import Net

STEPS, UNFROZEN_AT = 8, 3
"""The parameters are unfrozen within an accumulation window of two steps."""


class Unfreezing(Callback):
    """Freezes a part of the module at first.

    Args:
        adds: it was frozen before, so the optimizer does not have it yet.
    """

    def __init__(self, adds: bool = False) -> None:
        self._adds = adds

    def on_fit_start(self, fit: Fit) -> None:
        fit.module.get_submodule("layers").requires_grad_(False)

    def on_step_start(self, fit: Fit, batch: Any) -> None:
        if fit.state.step == UNFROZEN_AT:
            layers = fit.module.get_submodule("layers").requires_grad_(True)
            if self._adds:
                named = [(f"layers.{name}", p) for name, p in layers.named_parameters()]
                fit.optimizer.add_param_group({"params": named})


def frozen() -> Net:
    net = Net()
    net.layers.requires_grad_(False)
    return net


def data() -> TensorDataset:
    return TensorDataset(torch.randn(32, 6, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 3)


def trained(net: nn.Module, *callbacks: Callback, **options: Any) -> dict[str, list[float]]:
    settings: dict[str, Any] = {
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        "train": Loader(data(), 8, shuffle=False),
        "max_duration": f"{STEPS}st",
        "accumulate": 2,
        "clip_norm": 0.5,
        "device": "cpu",
        **options,
    }
    fit = Trainer(module=net, callbacks=callbacks, **settings).fit()
    return {name: whole(each).reshape(-1).tolist() for name, each in fit.module.named_parameters()}


def by_hand(trained: Callable[[Net], nn.Module] | None = None) -> dict[str, list[float]]:
    """The same with torch alone: `trained` says what the optimizer has; None: all, the layers frozen at first."""
    net = Net()
    part = net if trained is None else trained(net)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)
    inputs, labels = data().tensors
    for step in range(STEPS):
        if trained is None:
            net.layers.requires_grad_(step >= UNFROZEN_AT)
        rows = slice(step * 8 % 32, step * 8 % 32 + 8)
        (net.training_step([inputs[rows], labels[rows]]) / 2).backward()
        if step % 2:
            torch.nn.utils.clip_grad_norm_(part.parameters(), 0.5)
            optimizer.step()
            net.zero_grad()
    return {name: p.reshape(-1).tolist() for name, p in net.named_parameters()}


def assert_close(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name


def test_one_process_trains_what_was_unfrozen() -> None:
    assert_close(trained(Net(), Unfreezing()), by_hand())
    assert_close(trained(frozen(), Unfreezing(adds=True)), by_hand())


def test_what_was_unfrozen_and_is_not_in_the_optimizer_is_refused() -> None:
    with pytest.raises(InvalidStep, match=r"layers.0.weight, layers.0.bias was unfrozen.* freeze .* in on_fit_start"):
        trained(frozen(), Unfreezing())


def test_gradients_of_what_the_optimizer_does_not_have_do_not_count_in_the_norm() -> None:
    def of_head(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for name, p in named if name.startswith("head")], lr=0.1, momentum=0.9)

    assert_close(trained(Net(), optimizer=of_head), by_hand(lambda net: net.head))


def two(folder: str) -> None:
    cases: dict[str, Any] = {
        "ddp": "ddp",
        "ddp, unused parameters": DDP(find_unused=True),
        "ddp, not wrapped": DDP(wrapped=False),
        "fsdp": "fsdp",
    }
    found = {name: trained(Net(), Unfreezing(), strategy=strategy) for name, strategy in cases.items()}
    for name in ("ddp", "fsdp"):
        found[f"{name}, added"] = trained(frozen(), Unfreezing(adds=True), strategy=name)
    Path(folder, f"found-{os.environ['RANK']}").write_text(json.dumps(found))
    empty, fsdp = Net(), FSDP()
    empty.nothing = nn.Parameter(torch.empty(0))
    fsdp.open("cpu")
    with pytest.raises(InvalidSetup, match=r"nothing has no elements.* freeze it"):
        fsdp.prepare(empty, Precision("fp32", fsdp.device))


def test_two_processes_average_the_gradients_of_what_was_unfrozen(tmp_path: Path, forks: Any) -> None:
    forks.succeed(two, tmp_path, processes=2)

    for rank in range(2):
        found = json.loads((tmp_path / f"found-{rank}").read_text())
        assert len(found) == 6
        for weights in found.values():
            assert_close(weights, by_hand())
