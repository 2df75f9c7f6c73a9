"""Padding of the last dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from trainkit.errors import InvalidSetup


def pad(
    tensor: Tensor | Sequence[Tensor],
    value: float,
    padding: Literal["longest", "max_length"] | None = None,
    max_length: int | None = None,
    side: Literal["left", "right"] = "right",
    op: Literal["stack", "cat"] | Callable[[Any], Any] | None = None,
) -> Any:
    """Makes the last dimension of one tensor, or of all of a list or tuple, equally long.

    Args:
        tensor: one tensor, or a list or tuple of them.
        value: what fills the gap.
        padding: `longest` (default for several) or `max_length` (default, and the only one, for one tensor).
        max_length: the length for `max_length`.
        side: where the gap is.
        op: `stack`, `cat` or a function, applied to the padded list.

    Returns:
        A tensor for one tensor; a list for a list, a tuple for a tuple; what `op` returns.

    Raises:
        InvalidSetup: arguments that do not go together, or a tensor longer than `max_length`.
    """
    single = isinstance(tensor, Tensor)
    mode = padding or ("max_length" if single else "longest")
    if mode not in ("longest", "max_length") or side not in ("left", "right"):
        raise InvalidSetup(f"padding is 'longest' or 'max_length', side 'left' or 'right', not {mode!r} and {side!r}")
    if isinstance(tensor, Tensor):
        if mode == "longest" or op is not None:
            raise InvalidSetup("one tensor is padded to max_length, and op is for several")
        return _padded(tensor, value, _given(max_length), side)
    length = max(each.shape[-1] for each in tensor) if mode == "longest" else _given(max_length)
    padded = [_padded(each, value, length, side) for each in tensor]
    if op is None:
        return tuple(padded) if isinstance(tensor, tuple) else padded
    return _operation(op)(padded)


def _given(max_length: int | None) -> int:
    if max_length is None:
        raise InvalidSetup("padding='max_length' needs max_length")
    return max_length


def _padded(tensor: Tensor, value: float, length: int, side: str) -> Tensor:
    gap = length - tensor.shape[-1]
    if gap < 0:
        raise InvalidSetup(f"a tensor of shape {tuple(tensor.shape)} is longer than {length}")
    return torch.nn.functional.pad(tensor, (gap, 0) if side == "left" else (0, gap), value=value)


def _operation(op: str | Callable[[Any], Any]) -> Callable[[Any], Any]:
    if callable(op):
        return op
    if op not in ("stack", "cat"):
        raise InvalidSetup(f"op is 'stack', 'cat' or a function, not {op!r}")
    return torch.stack if op == "stack" else torch.cat
