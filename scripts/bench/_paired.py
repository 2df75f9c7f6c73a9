"""A loop and the same steps by hand, in blocks that alternate within one process.

`Paired` is the training data of the loop that is measured: it times the block that the loop has just done, then runs
the same block by hand, on a copy of the model, and times that. This file needs torch alone, so that it runs in the
environments of peers too.
"""

from __future__ import annotations

import copy
import ctypes
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Work:
    """A model, and batches of 32 for one block of steps."""

    make: Callable[[], nn.Module]
    sample: tuple[int, ...]
    steps: int

    def module(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()

    def batches(self) -> list[Batch]:
        torch.manual_seed(1)
        return [(torch.randn(32, *self.sample), torch.randint(0, 10, (32,))) for _ in range(self.steps)]


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


SMALL, IMAGES = Work(mlp, (64,), 200), Work(resnet20, (3, 32, 32), 2)


class Paired:
    """Training data that measures who trains on it. The first pair warms up and does not count."""

    def __init__(self, work: Work, pairs: int) -> None:
        self.batches, self._pairs = work.batches(), pairs
        self._module = copy.deepcopy(work.module())
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=LEARNING_RATE)
        self._by_hand: list[float] = []
        self._loop: list[float] = []

    def __len__(self) -> int:
        return (self._pairs + 1) * len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self._pairs + 1):
            start = time.process_time_ns()
            yield from self.batches
            self._loop.append(self._microseconds(start))
            start = time.process_time_ns()
            self._train()
            self._by_hand.append(self._microseconds(start))

    def _microseconds(self, start: int) -> float:
        return (time.process_time_ns() - start) / 1000 / len(self.batches)

    def _train(self) -> None:
        module, optimizer = self._module, self._optimizer
        for inputs, labels in self.batches:
            loss = F.cross_entropy(module(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def measured(self) -> Measured:
        """What was found, when the loop went through all of it."""
        pairs = list(zip(self._loop, self._by_hand, strict=False))[1:]
        if len(pairs) < self._pairs - 1:  # a loop that knows its length does not ask for what follows the last block
            raise RuntimeError(f"the loop did {len(pairs)} of {self._pairs} pairs")
        differences = sorted(loop - by_hand for loop, by_hand in pairs)
        low, high = bounds(differences)
        return Measured(statistics.median(each for _, each in pairs), statistics.median(differences), low, high)


@dataclass(frozen=True)
class Measured:
    """Microseconds of processor time a step: by hand, and the median of what the loop takes more, with 95 % bounds."""

    by_hand: float
    difference: float
    low: float
    high: float


def bounds(ordered: Sequence[float]) -> tuple[float, float]:
    """95 % bounds of the median, by the ranks of ordered values."""
    middle, reach = (len(ordered) - 1) / 2, 0.98 * math.sqrt(len(ordered))
    return ordered[max(0, math.floor(middle - reach))], ordered[min(len(ordered) - 1, math.ceil(middle + reach))]


def settle() -> None:
    """One thread, and memory that stays with the process: whether freed tensors go back to the system, and who pays
    for fetching them again, is chance, and more than any loop costs."""
    torch.set_num_threads(1)
    trim_threshold, mmap_max = -1, -4  # of <malloc.h>
    libc = ctypes.CDLL(None)
    libc.mallopt(trim_threshold, 2**31 - 1)
    libc.mallopt(mmap_max, 0)
