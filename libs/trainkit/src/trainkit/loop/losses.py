"""What a step returns, and what becomes of it: one loss to go backward from, and sums for a mean that is exact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit.errors import InvalidStep
from trainkit.module import Loss

if TYPE_CHECKING:
    from trainkit.strategies.base import Strategy


def loss_of(output: Any, step: str) -> Tensor | Loss:
    """The loss in what a step returned.

    Raises:
        InvalidStep: there is none that can be used.
    """
    if isinstance(output, Mapping):
        if "loss" not in output:
            raise InvalidStep(f"{step} returned a mapping without 'loss'; it has {', '.join(map(repr, output))}")
        output = output["loss"]
    if isinstance(output, Tensor) and output.ndim == 0:
        return output
    if isinstance(output, Loss) and isinstance(output.sum, Tensor) and output.sum.ndim == 0:
        return output
    found = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
    raise InvalidStep(f"{step} returned {found}: return a scalar tensor, a Loss(sum, count), or a mapping with 'loss'")


class Mean:
    """A mean over steps and processes, as a sum and a weight.

    On the host they are numbers; on an accelerator they stay on the device, so that adding never waits for it.
    """

    __slots__ = ("_device", "_on_host", "_sum", "_weight")

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_host = device, device.type == "cpu"
        self._sum: Any = 0.0 if self._on_host else torch.zeros((), device=device)
        self._weight: Tensor | float = 0.0

    def add(self, loss: Tensor | Loss, rows: float) -> None:
        """Adds a batch of `rows` samples."""
        weight: Tensor | float = rows
        if isinstance(loss, Loss):
            if not rows:
                return
            weight, rows = loss.count, 1.0
            loss = loss.sum
        if self._on_host:
            self._sum += loss.item() * rows
        else:
            self._sum.add_(loss.detach(), alpha=rows)
        self._weight = self._weight + weight

    def partial(self) -> Tensor:
        """Sum and weight of this process: shape (2,), 64 bits."""
        parts = (self._sum, self._weight)
        return torch.stack([torch.as_tensor(each, dtype=torch.float64, device=self._device) for each in parts])

    def over(self, strategy: Strategy) -> tuple[float, float]:
        """Sum and weight over all processes."""
        if strategy.world_size == 1:
            return float(self._sum), float(self._weight)
        total, weight = strategy.sum(self.partial()).tolist()
        return total, weight

    def load(self, values: Tensor) -> None:
        """Takes over what `partial` returned."""
        self.clear()
        self._sum += float(values[0])
        self._weight = float(values[1])

    def clear(self) -> None:
        self._sum = 0.0 if self._on_host else self._sum.zero_()
        self._weight = 0.0
