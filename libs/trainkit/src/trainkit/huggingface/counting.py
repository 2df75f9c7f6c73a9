"""Over how many targets a loss is a mean: seen in the call of torch's loss function that computes it.

Models compute their loss by themselves and return the mean alone. While a model runs, the loss functions of
`torch.nn.functional` are therefore replaced by ones that compute the same and keep sum and count. A mode of
`torch.overrides` would see them too, but costs every operation of the model a call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.module import Loss

_Count = Callable[[Mapping[str, Any]], "Tensor | int | None"]


class Means:
    """The means that loss functions of torch computed. The mean of no targets is 0 instead of not a number: a process
    may have none of an update's."""

    def __init__(self) -> None:
        self._noted: list[tuple[Tensor, int, Loss]] = []

    def note(self, total: Tensor, count: Tensor | int) -> Tensor:
        """Returns the mean."""
        mean = total / (count.clamp(min=torch.finfo(total.dtype).tiny) if isinstance(count, Tensor) else max(count, 1))
        self._noted.append((mean, mean._version, Loss(total, count)))
        return mean

    def counted(self, loss: Tensor) -> Loss | None:
        """Sum and count of a loss that is one of the means. What was added to it in place weighs as its targets do.

        Returns:
            None when the loss is something else.
        """
        for mean, version, noted in self._noted:
            if mean is loss:
                return noted if loss._version == version else Loss(loss * noted.count, noted.count)
        return None


@contextmanager
def noted_means() -> Iterator[Means]:
    """Gives the means that are computed within it."""
    global _means
    before, _means = _means, Means()
    for name, counting in _COUNTING.items():
        setattr(F, name, counting)
    try:
        yield _means
    finally:
        _means = before
        if before is None:
            for name, original in _ORIGINALS.items():
                setattr(F, name, original)


_means: Means | None = None


def _of_classes(arguments: Mapping[str, Any]) -> Tensor | int | None:
    """What torch divides by: the targets that are not ignored, each as often as its class weighs."""
    target, weight = arguments["target"], arguments["weight"]
    if target.is_floating_point():  # shares of all classes
        return int(target.numel() // max(1, target.shape[min(1, target.ndim - 1)]))
    counted = target != arguments["ignore_index"]
    if weight is None:
        return counted.sum()  # type: ignore[no-any-return]
    weights = weight[target.masked_fill(~counted, 0)]
    return weights.masked_fill(~counted, 0).sum()  # type: ignore[no-any-return]


def _of_elements(arguments: Mapping[str, Any]) -> int:
    return int(torch.broadcast_shapes(arguments["input"].shape, arguments["target"].shape).numel())


def _of_errors(arguments: Mapping[str, Any]) -> int | None:
    """As of elements, unless they are weighted: then torch divides by the weights."""
    return _of_elements(arguments) if arguments.get("weight") is None else None


_COUNTS: dict[str, _Count] = {
    "cross_entropy": _of_classes,
    "nll_loss": _of_classes,
    "binary_cross_entropy": _of_elements,
    "binary_cross_entropy_with_logits": _of_elements,
    "mse_loss": _of_errors,
    "l1_loss": _of_errors,
    "smooth_l1_loss": _of_errors,
    "huber_loss": _of_errors,
}
_ORIGINALS = {name: getattr(F, name) for name in _COUNTS}


def _counting(original: Callable[..., Tensor], count_of: _Count) -> Callable[..., Tensor]:
    signature = inspect.signature(original)

    @wraps(original)
    def counting(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        count = count_of(given.arguments) if _is_mean(given.arguments) else None
        if count is None or _means is None:
            return original(*args, **kwargs)
        given.arguments["reduction"] = "sum"
        return _means.note(original(*given.args, **given.kwargs), count)

    return counting


def _is_mean(arguments: Mapping[str, Any]) -> bool:
    older = arguments.get("size_average") is not None or arguments.get("reduce") is not None
    return arguments["reduction"] == "mean" and not older


_COUNTING = {name: _counting(original, _COUNTS[name]) for name, original in _ORIGINALS.items()}
