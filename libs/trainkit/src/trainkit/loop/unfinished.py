"""An accumulation window that was cut short: each process's gradients and counts, stored and put back.

Gradients of a window have not met yet, so every process has others. They are stored whole, under the names of their
parameters, and so fit any strategy that can hold them. As many processes go on with the same bits. Another number
starts with the sum of all of them on the first process, which is what matters: they are added up at the window's end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit.errors import WrongCheckpoint

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit

OF_WINDOW = ("gradients", "denominator", "sums", "weighed", "planned")
"""The parts of it that count for another number of processes too."""


def take(fit: Fit) -> dict[str, Any]:
    """What this process holds of its window, or nothing."""
    own: dict[str, Any] = {}
    if fit.state.window or fit.manual:
        window = fit.window
        weighed = [window.expected, window.weighed]
        planned = window.planned() if fit.state.window else 0
        held = (fit.strategy.partial_gradients(), window.denominator, window.sums, weighed, planned)
        own.update(zip(OF_WINDOW, held, strict=True))
    if fit.trainer.zero_gradients and fit.strategy.holds_gradients:
        own["zeroed"] = [name for name, p in fit.module.named_parameters() if p.grad is not None]
    return own


def put(fit: Fit, own: Mapping[str, Any]) -> None:
    """Takes over what `take` returned.

    Raises:
        WrongCheckpoint: this strategy cannot hold gradients of an unfinished window.
    """
    parameters = dict(fit.module.named_parameters())
    for name in own.get("zeroed", ()):
        parameters[name].grad = torch.zeros_like(parameters[name])
    if "gradients" not in own:
        return
    if not fit.strategy.stores_window:
        raise WrongCheckpoint(
            f"the checkpoint was taken within an accumulation window, and strategy={fit.strategy.name!r} cannot go on "
            "within one: go on with single, ddp or fsdp, and change the strategy after the next checkpoint"
        )
    _weigh_again(fit, own)
    fit.strategy.put_partial_gradients(own["gradients"])
    denominator = own["denominator"]
    on_device = isinstance(denominator, Tensor)
    fit.window.denominator = denominator.to(fit.strategy.device) if on_device else denominator
    fit.window.sums = own["sums"]
    fit.window.expected, fit.window.weighed = own.get("weighed", (0, 0))


def _weigh_again(fit: Fit, own: Mapping[str, Any]) -> None:
    """Scales gradients of means to the window as it is planned now: another duration ends it elsewhere."""
    planned, gradients = own.get("planned", 0), list(own["gradients"].values())
    if not (planned and fit.state.window and gradients) or own["sums"]:
        return
    if (now := fit.window.planned()) not in (0, planned):
        torch._foreach_mul_(gradients, planned / now)


def summed(
    fit: Fit, one: Mapping[str, Any], everyones: Callable[[int], Mapping[str, Any]], before: int
) -> dict[str, Any]:
    """What all of `before` processes held, as what this one of another number of processes goes on with.

    Args:
        one: the plain part of what any of them held.
        everyones: reads what the process of a rank held.
    """
    if "gradients" not in one:
        return {}
    gradients, denominator = dict[str, Tensor](), 0.0
    for rank in range(before if fit.strategy.is_main else 0):
        own = everyones(rank)
        for name, gradient in own["gradients"].items():
            gradients[name] = gradients[name].add_(gradient) if name in gradients else gradient
        denominator += float(own["denominator"] or 0)
    if gradients and not one["sums"]:  # means were weighted by the processes over which they were to be averaged
        torch._foreach_mul_(list(gradients.values()), fit.strategy.world_size / before)
    return {**one, "gradients": gradients, "denominator": denominator or None}
