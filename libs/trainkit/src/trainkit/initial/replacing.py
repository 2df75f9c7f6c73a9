"""Replaces the tensors of a module by others that mean the same."""

from __future__ import annotations

from torch import Tensor, nn


def like(before: Tensor, now: Tensor) -> Tensor:
    """`now` as what `before` is in its module: a parameter with its attributes, or a buffer."""
    if not isinstance(before, nn.Parameter):
        return now
    parameter = nn.Parameter(now, requires_grad=before.requires_grad)
    parameter.__dict__.update({name: value for name, value in before.__dict__.items() if name != "_is_param"})
    return parameter
