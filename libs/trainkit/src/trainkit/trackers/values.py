"""Copies of logged values: what the caller changes after logging does not change the row."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from trainkit.sharded import is_sharded

_PLAIN = frozenset((float, int, bool))
_SHARDED = "a sharded tensor, which one process cannot read alone: log trainkit.sharded.whole(tensor), on every process"


class Values(dict[str, "float | Tensor"]):
    """The values of one row. Nothing else refers to its tensors.

    Attributes:
        copies: an event for each device behind the copies that it makes; wait for them before another thread reads.
    """

    copies: tuple[torch.Event, ...] = ()

    def wait(self) -> None:
        """Returns when the copies of tensors are complete."""
        for copied in self.copies:
            copied.synchronize()


def copied(values: Mapping[str, float | Tensor]) -> Values:
    """A copy of a row's values, made without waiting for a device.

    A number, and a tensor on the host, becomes a number. A tensor on a device is copied there, behind the work that
    computes it. Copying a `Values` returns it.
    """
    if type(values) is Values:
        return values
    row = Values(values)
    if not _PLAIN.issuperset(map(type, row.values())):
        _copy_in_place(row)
    return row


def _copy_in_place(row: Values) -> None:
    devices: dict[torch.device, torch.Event] = {}
    for name, value in row.items():
        row[name] = mine = copied_value(value)
        if isinstance(mine, Tensor) and mine.device.type not in ("cpu", "meta"):
            devices.setdefault(mine.device, torch.Event(mine.device))
    for device, event in devices.items():
        event.record(torch.accelerator.current_stream(device))
    row.copies = tuple(devices.values())


def copied_value(value: Any) -> Any:
    """A copy of one value. What is no number is copied as it is, or as a text of its type, for the tracker to
    refuse."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return _copied_tensor(value.detach())
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    try:
        return deepcopy(value)
    except Exception:  # what cannot be copied either is no reason to end a run
        return f"a {type(value).__name__}, which is no number"


def _copied_tensor(tensor: Tensor) -> Any:
    if is_sharded(tensor):
        return _SHARDED
    return tensor.item() if tensor.device.type == "cpu" and tensor.numel() == 1 else tensor.clone()
