"""What trainkit's loop costs over the same steps written by hand, in microseconds of processor time a step.

Both train their own copy of one model on the same ready batches, in blocks that alternate within one process: the data
that trainkit's loop reads from times the block that the loop has just done, then runs the same block by hand and times
that.

Bars, on the upper 95 % bound of the median difference: a small MLP (64-128-10, batch 32) at most 10 microseconds with
nothing switched on, and at most 40 with a callback and the loss logged at every step; a ResNet-20 at 32x32 shows no
difference (the lower bound is not above 0). The peers in the table were measured apart, on a machine of this kind.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from _harness import Bar, conclude, table
from torch import Tensor, nn
from trainkit import Callback, Tracker, Trainer
from trainkit.loop.fit import Fit
from trainkit.trackers import RunContext

PEERS = {"Ignite Engine": 5, "Lightning Fabric": 58, "Accelerate": 194, "Lightning Trainer": 430, "HF Trainer": 708}
"""Microseconds over the bare loop, where the bare loop's step took 240."""


class Step(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = outputs // inputs
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.way = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.way(x))


def resnet20() -> nn.Module:
    sizes = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    blocks = [Block(before, after) for before, after in pairwise(sizes)]
    first = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Paired:
    """Training data that measures who trains on it, and trains by hand in between."""

    def __init__(self, batches: Sequence[Any], module: Step, pairs: int) -> None:
        self._batches, self._module, self._pairs = batches, module, pairs
        self._optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        self.by_hand: list[float] = []
        self.ours: list[float] = []

    def __len__(self) -> int:
        return (self._pairs + 1) * len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._pairs + 1):
            start = time.process_time_ns()
            yield from self._batches
            self.ours.append(self._microseconds(start))
            start = time.process_time_ns()
            self._by_hand()
            self.by_hand.append(self._microseconds(start))

    def _microseconds(self, start: int) -> float:
        return (time.process_time_ns() - start) / 1000 / len(self._batches)

    def _by_hand(self) -> None:
        module, optimizer = self._module, self._optimizer
        for batch in self._batches:
            loss = module.training_step(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


class Counted(Callback):
    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        self.count += 1


class Kept(Tracker):
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def open(self, context: RunContext) -> None:
        self.rows = []

    def log(self, values: Mapping[str, float | Tensor], step: int) -> None:
        self.rows.append((step, values))

    def close(self, outcome: str) -> None:
        self.rows.clear()


@dataclass(frozen=True)
class Measured:
    by_hand: float
    difference: float
    low: float
    high: float


def measure(make: Callable[[], nn.Module], batches: Sequence[Any], pairs: int, **options: Any) -> Measured:
    torch.manual_seed(0)
    module = Step(make())
    data = Paired(batches, copy.deepcopy(module), pairs)
    optimizer = partial(torch.optim.SGD, lr=0.01)
    Trainer(module=module, optimizer=optimizer, train=data, max_duration="1ep", **{"log_every": None, **options}).fit()
    differences = sorted(ours - hand for ours, hand in zip(data.ours[1:], data.by_hand[1:], strict=True))
    low, high = bounds(differences)
    return Measured(statistics.median(data.by_hand[1:]), statistics.median(differences), low, high)


def bounds(ordered: Sequence[float]) -> tuple[float, float]:
    """95 % bounds of the median, by the ranks of ordered values."""
    reach = 0.98 * math.sqrt(len(ordered))
    return ordered[max(0, round(len(ordered) / 2 - reach))], ordered[
        min(len(ordered) - 1, round(len(ordered) / 2 + reach))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps and no ResNet")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    small = [(torch.randn(32, 64), torch.randint(0, 10, (32,))) for _ in range(50 if quick else 200)]
    images = [(torch.randn(32, 3, 32, 32), torch.randint(0, 10, (32,))) for _ in range(4)]
    pairs = 20 if quick else 40
    found = {
        "MLP, nothing on": measure(mlp, small, pairs),
        "MLP, callback and log each step": measure(
            mlp, small, pairs, callbacks=[Counted()], trackers=[Kept()], log_every="1st"
        ),
    }
    if not quick:
        found["ResNet-20"] = measure(resnet20, images, 20)
    rows = [
        [name, f"{each.by_hand:.1f}", f"{each.difference:+.1f}", f"{each.low:+.1f} to {each.high:+.1f}"]
        for name, each in found.items()
    ]
    rows += [[f"{name} (measured apart)", "240", f"{over:+d}", ""] for name, over in PEERS.items()]
    table("loop overhead, microseconds of processor time a step", ["what", "by hand", "over it", "95 % bounds"], rows)
    limits = {"MLP, nothing on": 10.0, "MLP, callback and log each step": 40.0}
    bars = [
        Bar(name=name, ours=found[name].high, peer=58, peer_name="Lightning Fabric", unit="us", bar=limit)
        for name, limit in limits.items()
    ]
    if "ResNet-20" in found:
        lower = found["ResNet-20"].low
        bars.append(Bar(name="ResNet-20", ours=max(lower, 0.0), peer=1, peer_name="by hand", unit="us", bar=0.001))
    raise SystemExit(conclude("loop_overhead", bars))


if __name__ == "__main__":
    main()
