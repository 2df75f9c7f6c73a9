"""Sharded tensors, without importing what makes them: that takes a second, and most runs have none."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part that is on this process; all of it when it is not sharded."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def whole(tensor: Tensor) -> Tensor:
    """All of it; every process has to ask."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def cut_like(tensor: Tensor, other: Tensor) -> Tensor:
    """This process's shard of a tensor that every process has, cut as `other` is; all of it when that is whole."""
    if is_sharded(tensor) or not is_sharded(other):
        return tensor
    made: Any = sys.modules["torch.distributed.tensor"]
    like: Any = other
    cut: Tensor = made.distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return cut


def put(target: Tensor, value: Tensor) -> None:
    """Copies all of `value`, which this process has, into `target`; into a sharded one, this process's part of it."""
    local(target).copy_(local(cut_like(value, target)))
