"""Saves memory by computing activations again in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from trainkit.errors import InvalidSetup


def recompute(module: nn.Module, classes: Sequence[type[nn.Module]]) -> None:
    """Makes every submodule of these classes recompute its activations. Names of parameters stay as they are.

    Raises:
        InvalidSetup: there is no such submodule.
    """
    found = [part for part in module.modules() if isinstance(part, tuple(classes))]
    if not found:
        wanted = ", ".join(kind.__name__ for kind in classes)
        raise InvalidSetup(f"recompute names {wanted}, and {type(module).__name__} has no such submodule")
    for part in found:
        if not hasattr(part, "_recomputed"):
            part.forward = partial(_recomputed, part, part.forward)
            part._recomputed = True  # type: ignore[assignment]


def _recomputed(part: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not part.training:
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
