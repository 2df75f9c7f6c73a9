"""A peer's own save of weights and AdamW's moments, in the environment of `trainers.txt`. Prints medians as JSON.

This file needs torch alone until it is a peer's turn.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


def weights(megabytes: int) -> nn.ParameterList:
    """Layers of 4 MB. AdamW keeps two moments of each, which makes three times their bytes to store."""
    count = max(1, megabytes * 1_000_000 // (3 * 2**22))
    return nn.ParameterList([nn.Parameter(torch.randn(1024, 1024)) for _ in range(count)])


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Stalls:
    """A save and a copy of the same tensors, in turns; the first round does not count."""

    def __init__(self, module: nn.Module, optimizer: Any, save: Callable[[], None]) -> None:
        moments = [value for kept in optimizer.state.values() for value in kept.values() if isinstance(value, Tensor)]
        self._tensors, self._save = [*(p.detach() for p in module.parameters()), *moments], save
        self._there = [torch.empty_like(each).copy_(each) for each in self._tensors]

    def _copy(self) -> None:
        for there, each in zip(self._there, self._tensors, strict=True):
            there.copy_(each)

    def medians(self, rounds: int) -> dict[str, float]:
        pairs = [(timed(self._copy), timed(self._save)) for _ in range(rounds + 1)][1:]
        copies, stalls = zip(*pairs, strict=True)
        return {"copy": statistics.median(copies), "stall": statistics.median(stalls)}


def lightning(folder: Path, megabytes: int, rounds: int) -> dict[str, float]:
    import lightning as L

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.parts, self.found = weights(megabytes), dict[str, float]()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return sum((part.sum() for part in self.parts), torch.zeros(()))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

        def on_train_batch_end(self, *_: Any) -> None:
            trainer, optimizer = self.trainer, self.trainer.optimizers[0]
            save = partial(trainer.save_checkpoint, folder / "last.ckpt")
            self.found = Stalls(self, optimizer, save).medians(rounds)

    net = Net()
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator="cpu", devices=1, max_steps=1, enable_checkpointing=False, **options)
    trainer.fit(net, [torch.zeros(1)])
    return net.found


def accelerate(folder: Path, megabytes: int, rounds: int) -> dict[str, float]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    module = weights(megabytes)
    module, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=1e-4))
    accelerator.backward(sum((part.sum() for part in module), torch.zeros(())))
    optimizer.step()
    return Stalls(module, optimizer.optimizer, lambda: accelerator.save_state(str(folder))).medians(rounds)


def main() -> None:
    peer, name, megabytes, rounds = sys.argv[1:]
    warnings.simplefilter("ignore")
    folder = Path(name)
    folder.mkdir(parents=True)
    found = {"Lightning": lightning, "Accelerate": accelerate}[peer](folder, int(megabytes), int(rounds))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(json.dumps({**found, "bytes": size}))


if __name__ == "__main__":
    main()
