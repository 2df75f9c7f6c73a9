"""A watch on the gradients of single parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainkit.callbacks.base import Callback
from trainkit.errors import InvalidSetup, NonFiniteLoss
from trainkit.sharded import local

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit


class WatchGradients(Callback):
    """Looks at every parameter's gradient: names the first that is not finite, and sends norms to the trackers.

    Looking waits for the device, so `every` is not 1 unless you are hunting. Put `non_finite="skip"` into the trainer
    to leave out such updates instead of stopping.

    Args:
        every: updates between two looks.
        log_norms: send `grad_norm/PARAMETER` of this process's shards.

    Raises:
        NonFiniteLoss: in training; names the parameters.
    """

    def __init__(self, every: int = 100, *, log_norms: bool = False) -> None:
        if every < 1:
            raise InvalidSetup(f"every has to be at least 1, not {every}")
        self._every, self._log_norms = every, log_norms

    def on_fit_start(self, fit: Fit) -> None:
        if not fit.strategy.holds_gradients:
            raise InvalidSetup(
                "WatchGradients reads the gradients of parameters, which deepspeed takes away: use stage 0 or fsdp"
            )

    def on_update_start(self, fit: Fit) -> None:
        if (fit.state.update + 1) % self._every:
            return
        named = {name: each.grad for name, each in fit.module.named_parameters() if each.grad is not None}
        if not named:
            return
        norms = torch.stack([norm.float() for norm in torch._foreach_norm([_local(each) for each in named.values()])])
        finite = norms.isfinite()
        if not bool(fit.strategy.sum((~finite).sum().float()) == 0):
            wrong = [name for name, good in zip(named, finite.tolist(), strict=True) if not good]
            raise NonFiniteLoss(
                f"update {fit.state.update + 1}: the gradient is not finite on process {fit.strategy.rank} in "
                f"{', '.join(wrong[:5]) or 'no parameter, but on another process'}"
                + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
            )
        if self._log_norms:
            fit.log({f"grad_norm/{name}": norm for name, norm in zip(named, norms.unbind(), strict=True)})


def _local(gradient: Tensor) -> Tensor:
    part = local(gradient)
    return part.coalesce().values() if part.is_sparse else part
