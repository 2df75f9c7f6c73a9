"""Finds processes whose weights went apart."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainkit.errors import Desynchronized
from trainkit.sharded import is_sharded

if TYPE_CHECKING:
    from trainkit.strategies.base import Strategy


def compare(strategy: Strategy) -> None:
    """Compares the weights of all processes, bit for bit; sharded ones are nobody's twin and left out.

    Raises:
        Desynchronized: on every process, naming the first parameter that differs and the ranks that differ from most.
    """
    mine = {name: _digest(p) for name, p in strategy.module.named_parameters() if not is_sharded(p)}
    everyones = strategy.gather(mine)
    for name in mine:
        values = [digests[name] for digests in everyones]
        if len(set(values)) > 1:
            usual = max(values, key=values.count)  # where two are as many: the first process's
            others = [str(rank) for rank, value in enumerate(values) if value != usual]
            raise Desynchronized(
                f"parameter {name} differs on rank {', '.join(others)} from the other processes: something changed it "
                "outside the loop, or a step used random numbers or data that should be the same everywhere"
            )


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=8).hexdigest()
