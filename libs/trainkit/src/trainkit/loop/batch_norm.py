"""Refuses batch norm over a single value, which a short last batch brings at the end of an epoch, in the first step."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.data.loader import Loader
from trainkit.errors import InvalidSetup

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit


def watch(fit: Fit, closing: ExitStack) -> None:
    """Looks at what reaches batch norm, where the last batch of an epoch leaves a process with one row. How many
    values a row has for each channel shows in the first step, on all processes alike."""
    feed, state, world = fit.feed, fit.state, fit.strategy.world_size
    if not isinstance(feed, Loader):  # the others count batches as they come
        return
    steps = feed.steps(state.epoch)
    if not steps or fit._last_step - state.step < steps - state.position:
        return
    samples = feed.samples(state.epoch, steps - 1)
    if samples // world > 1:  # what the process with the fewest rows gets
        return
    for name, part in fit.module.named_modules():
        if isinstance(part, _BatchNorm) and not isinstance(part, nn.SyncBatchNorm):
            closing.callback(part.register_forward_pre_hook(partial(_refuse, name, samples, world)).remove)


def _refuse(name: str, samples: int, world: int, part: nn.Module, given: tuple[Any, ...]) -> None:
    rows, channels, *_ = given[0].shape
    if part.training and given[0].numel() == rows * channels:
        raise InvalidSetup(
            f"{name} is a {type(part).__name__} and needs two values of each channel, and the last batch of an epoch "
            f"has {samples} sample(s) for {world} process(es), which leaves one of them with a single row: give the "
            "loader drop_last=True or another batch_size"
        )
