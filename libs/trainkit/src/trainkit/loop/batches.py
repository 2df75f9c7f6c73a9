"""Batches on the device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from trainkit.data.counted import leading


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


def halves(batch: Any) -> tuple[tuple[Any, float], tuple[Any, float]] | None:
    """A batch in two along the first dimension of its tensors, each with its share; None when there is one sample."""
    rows = leading(batch)
    if rows < 2:
        return None
    middle = rows // 2
    first, second = _rows(batch, rows, slice(0, middle)), _rows(batch, rows, slice(middle, rows))
    return (first, middle / rows), (second, 1 - middle / rows)


def _rows(batch: Any, rows: int, part: slice) -> Any:
    if isinstance(batch, Tensor):
        return batch[part] if batch.ndim and batch.shape[0] == rows else batch
    if isinstance(batch, Mapping):
        return {key: _rows(value, rows, part) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        if len(batch) == rows and not any(isinstance(each, (Tensor, Mapping, list, tuple)) for each in batch):
            return batch[part]
        return type(batch)(_rows(value, rows, part) for value in batch)
    return batch


def moved(batches: Iterable[Any], device: torch.device | None, dtype: torch.dtype | None = None) -> Iterator[Any]:
    """All batches on `device`, with floating tensors of `dtype`; None leaves them as they are. Loaders give batches on
    the host, where there is nothing to move."""
    if device is not None and device.type != "cpu":
        batches = _on_device(batches, device)
    return iter(batches) if dtype is None else (cast(batch, dtype) for batch in batches)


def _on_device(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    return (on_device(batch, device) for batch in batches)


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating tensors as `dtype`; whole numbers and truth values stay what they are."""
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {key: cast(value, dtype) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(cast(value, dtype) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(cast(value, dtype) for value in batch)
    return batch
