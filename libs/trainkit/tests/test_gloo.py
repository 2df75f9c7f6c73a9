"""At the end of a run, gloo's threads hold no tensor: a thread that releases one while Python shuts down aborts."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from trainkit import Callback, Trainer
from trainkit.data import Loader
from trainkit.loop.fit import Fit

from scripts.testbed.ports import free_port

A_WHILE_S = 0.5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any) -> Tensor:
        return self.layer(batch[0]).square().mean()


class SlowToRelease:
    """An attribute of a tensor. Its release takes a while, unless the run ends first."""

    def __init__(self, run_ended: threading.Event, ended_before: list[bool]) -> None:
        self._run_ended, self._ended_before = run_ended, ended_before

    def __del__(self) -> None:
        self._ended_before.append(self._run_ended.wait(A_WHILE_S))


class LeavesATensor(Callback):
    """Starts a collective whose worker thread is the last to hold the tensor."""

    def __init__(self, slow: SlowToRelease) -> None:
        self._slow: SlowToRelease | None = slow

    def on_fit_end(self, fit: Fit) -> None:
        others = dist.distributed_c10d._get_default_store()
        tensor: Any = torch.ones(1)
        tensor.slow, self._slow = self._slow, None
        if not fit.strategy.is_main:
            others.get("main/left")  # until then, the main process's collective cannot complete
        dist.all_reduce(tensor, async_op=True)
        del tensor
        if fit.strategy.is_main:
            others.set("main/left", "")


def run_that_leaves_a_tensor(folder: str, strategy: str, port: int) -> None:
    dist.destroy_process_group()  # the run creates its own
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    run_ended, ended_before = threading.Event(), list[bool]()
    fit = Trainer(
        module=Net(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train=Loader(TensorDataset(torch.ones(8, 4)), 2),
        max_duration="1ep",
        device="cpu",
        strategy=strategy,
        callbacks=[LeavesATensor(SlowToRelease(run_ended, ended_before))],
    ).fit()
    run_ended.set()
    assert fit.state.finished
    assert ended_before == [False], f"rank {fit.strategy.rank}: the run ended while a thread held a tensor"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_ends_after_the_threads_of_its_collectives_released_every_tensor(
    strategy: str, tmp_path: Path, forks: Any
) -> None:
    forks.succeed(run_that_leaves_a_tensor, tmp_path, processes=2, strategy=strategy, port=free_port())
