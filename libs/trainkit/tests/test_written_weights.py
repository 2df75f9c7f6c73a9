"""Weights that something else than an update writes: training continues from what was written, on every strategy, and
from the trained weights when an average was swapped in for an evaluation."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainkit import Callback, Checkpoints, Trainer
from trainkit.callbacks import EMA
from trainkit.data import Loader
from trainkit.errors import Interrupted
from trainkit.loop.fit import Fit
from trainkit.sharded import whole
from trainkit.strategies import FSDP


class Words(nn.Module):
    """A language model in small: its embedding and its head are parameters of the root, not of a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.head = nn.Linear(8, 7)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        hidden = self.embedding(batch[0])
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return F.cross_entropy(self.head(hidden), (batch[0] + 1) % 7)


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        self.losses.append(float(fit.strategy.sum(loss.detach().clone())))


class Halving(Callback):
    """Halves all weights after the third step, and evaluates before and after that."""

    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        if fit.state.step == 3:
            fit.evaluate()
            with fit.strategy.writing_weights() as parameters:
                for p in parameters.values():
                    p.mul_(0.5)
            fit.evaluate()


class Doubling(Callback):
    """Doubles all weights after an evaluation, without a word to the strategy, as a user's code may do."""

    def on_evaluation_end(self, fit: Fit, results: Any) -> None:
        with torch.no_grad():
            for p in fit.module.parameters():
                p.mul_(2.0)


class Terminated(Callback):
    """SIGTERM on every process, when the evaluation of a step is over."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_evaluation_end(self, fit: Fit, results: Any) -> None:
        if fit.state.step == self._step and fit.resumed_step is None:
            os.kill(os.getpid(), signal.SIGTERM)


def trained(*callbacks: Callback, **options: Any) -> tuple[list[float], dict[str, list[float]], dict[str, float]]:
    """The losses of all steps, the weights, the results of the last evaluation."""
    torch.manual_seed(0)
    words, losses = TensorDataset(torch.arange(40) % 7), Losses()
    settings: dict[str, Any] = {
        "optimizer": partial(torch.optim.SGD, lr=0.2, momentum=0.9),
        "train": Loader(words, 8),
        "evaluate": Loader(words, 40, shuffle=False),
        "evaluate_every": "2st",
        "max_duration": "8st",
        **options,
    }
    fit = Trainer(module=Words(), callbacks=[losses, *callbacks], **settings).fit()
    weights = {name: whole(weight).reshape(-1).tolist() for name, weight in fit.strategy.weights().items()}
    return losses.losses, weights, dict(fit.results)


def policy(folder: str, name: str) -> Checkpoints:
    return Checkpoints(folder=Path(folder, name), every="3st")


def several(folder: str) -> None:
    """All cases of several processes."""
    cases: dict[str, tuple[list[Callback], dict[str, Any]]] = {
        "no evaluation": ([], {"evaluate": None}),
        "no average": ([], {}),
        "at every step": ([EMA(0.9)], {"evaluate_every": "1st"}),
        "gathered units": ([EMA(0.9)], {"strategy": FSDP(reshard_after_forward=False)}),
        "checkpoints": ([EMA(0.9)], {"checkpoints": policy(folder, "checkpoints")}),
        "Halving": ([Halving()], {}),
        "Doubling": ([Doubling()], {}),
        "Halving in DDP": ([Halving()], {"strategy": "ddp"}),
    }
    found = {
        name: trained(*callbacks, **{"strategy": "fsdp", **options}) for name, (callbacks, options) in cases.items()
    }
    with pytest.raises(Interrupted):
        trained(EMA(0.9), Terminated(4), strategy="fsdp", checkpoints=policy(folder, "terminated"))
    found["terminated"] = trained(EMA(0.9), strategy="fsdp", checkpoints=policy(folder, "terminated"))
    Path(folder, f"found-{os.environ['RANK']}").write_text(json.dumps(found))


Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, forks: Any) -> Found:
    """What both processes found in all cases."""
    folder = tmp_path_factory.mktemp("several")
    forks.succeed(several, folder, processes=2)
    return [json.loads((folder / f"found-{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", ["no average", "at every step", "gathered units", "checkpoints"])
def test_evaluations_of_averages_and_checkpoints_leave_no_trace_in_training(found: Found, case: str) -> None:
    for one in found:
        assert one[case][:2] == one["no evaluation"][:2]


def test_a_run_terminated_after_an_evaluation_of_averages_resumes_with_the_same_bits(found: Found) -> None:
    for one in found:
        losses, weights, results = one["terminated"]
        assert losses == one["no evaluation"][0][-len(losses) :]
        assert [weights, results] == one["checkpoints"][1:]


@pytest.mark.parametrize("case", ["checkpoints", "Halving", "Doubling", "Halving in DDP"])
def test_training_continues_from_the_weights_that_were_written_as_on_one_process(found: Found, case: str) -> None:
    callbacks = {"Halving": Halving, "Doubling": Doubling}.get(case.split()[0], partial(EMA, 0.9))
    losses, weights, results = trained(callbacks())
    for one in found:
        ours = one[case]
        assert ours[0] == pytest.approx([2 * loss for loss in losses], rel=1e-5)  # the sum of both processes' losses
        for name, weight in weights.items():
            assert ours[1][name] == pytest.approx(weight, rel=1e-5, abs=1e-6)
        assert ours[2] == pytest.approx(results, rel=1e-5)
