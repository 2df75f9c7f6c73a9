"""Batches on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def on_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on `device`; lists, tuples and mappings are gone through."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        moved = {key: on_device(value, device) for key, value in batch.items()}
        return moved if type(batch) is dict else type(batch)(moved)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(on_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(on_device(value, device) for value in batch)
    return batch.to(device) if hasattr(batch, "to") else batch


def moved(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """All batches on `device`. Loaders give batches on the host, where there is nothing to move."""
    if device.type == "cpu":
        return iter(batches)
    return (on_device(batch, device) for batch in batches)
