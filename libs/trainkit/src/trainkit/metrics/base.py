"""What an evaluation asks of a metric. Every `torchmetrics.Metric` is one.

`Trainer(metrics={"accuracy": MulticlassAccuracy(10)})` and an `evaluation_step` that returns `{"accuracy": (logits,
labels)}`: for each batch, `update(*values)` is called with what stands under the metric's name; after the set,
`compute`, on every process (it may communicate, as torchmetrics do); then `reset`. No row is seen twice and none is
missing: a process that has no row for a step does not call `update`, so that uneven last batches are exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Metric(Protocol):
    """Gathers over batches and computes once."""

    def update(self, *values: Any) -> None:
        """Adds one batch."""
        ...

    def compute(self) -> Tensor | float | Mapping[str, Tensor | float]:
        """The value over all batches of all processes, or several by name. Called on all processes at once."""
        ...

    def reset(self) -> None:
        """Forgets all batches."""
        ...

    def to(self, device: torch.device) -> Any:
        """Moves its state."""
        ...
