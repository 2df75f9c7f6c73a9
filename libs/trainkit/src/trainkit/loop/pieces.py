"""Optimizer state that DeepSpeed keeps in flat pieces, as the state of whole parameters, and back.

A process stores its pieces as they are, which costs nothing. Beside them it stores of which elements they consist, so
that another strategy, stage or number of processes can put them together. That takes host memory for all of the
optimizer's state on each process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from trainkit.errors import WrongCheckpoint

Layout: TypeAlias = Sequence[Mapping[str, Any]]
"""What `Strategy.layout` returns."""

_SCALARS = frozenset(("step", "eta", "mu", "mu_product"))
"""Keys of torch's element-by-element optimizers that hold one number for a whole parameter."""


def assembled(owns: Iterable[Mapping[str, Any]], shapes: Mapping[str, Sequence[int]]) -> dict[str, dict[str, Any]]:
    """The state of each parameter by its name.

    Args:
        owns: `pieces` and their `layout` of every process.
        shapes: of the parameters.
    """
    states: dict[str, dict[str, Any]] = {}
    for own in owns:
        for values, piece in zip(own["pieces"], own["layout"], strict=True):
            for name, at, start, length in piece["parts"]:
                _fill(states.setdefault(name, {}), values, list(shapes[name]), (start, at, length))
    return states


def cut(states: Mapping[str, Mapping[str, Any]], layout: Layout) -> list[dict[str, Any]]:
    """The state of each piece of a process.

    Raises:
        WrongCheckpoint: parameters of one piece made different numbers of steps.
    """
    pieces: list[dict[str, Any]] = []
    for described in layout:
        piece: dict[str, Any] = {}
        for name, at, start, length in described["parts"]:
            values = states.get(name, {})
            _refuse_other_scalars(piece, values, name)
            _fill(piece, values, [described["size"]], (at, start, length))
        pieces.append(piece)
    return pieces


def _fill(target: dict[str, Any], source: Mapping[str, Any], shape: list[int], place: tuple[int, int, int]) -> None:
    """Copies elements from `place[0]` of the source on to `place[1]` of a target of this shape."""
    at, to, length = place
    for key, value in source.items():
        if not isinstance(value, Tensor) or key in _SCALARS:
            target.setdefault(key, value.clone() if isinstance(value, Tensor) else value)
            continue
        if key not in target:
            target[key] = torch.zeros(shape, dtype=value.dtype)
        target[key].view(-1)[to : to + length] = value.reshape(-1)[at : at + length]


def _refuse_other_scalars(piece: Mapping[str, Any], values: Mapping[str, Any], name: str) -> None:
    for key in _SCALARS & piece.keys() & values.keys():
        if float(piece[key]) != float(values[key]):
            raise WrongCheckpoint(
                f"{name} has {key}={float(values[key]):g} and another parameter has {float(piece[key]):g}, because not "
                "every step used both; DeepSpeed keeps one for all: resume with single, ddp or fsdp"
            )
