"""Refuses batch norm over a single value, which a short batch brings: that of a `Loader` in the first step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainkit.data.counted import Counted
from trainkit.data.loader import Loader
from trainkit.errors import InvalidSetup

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit


def watch(fit: Fit, closing: ExitStack) -> None:
    """Looks at what reaches batch norm, where the last batch of an epoch leaves a process with one row. How many
    values a row has for each channel shows in the first step, on all processes alike. Data that is counted as it comes
    is looked at in each step."""
    feed, state, world = fit.feed, fit.state, fit.strategy.world_size
    if isinstance(feed, Counted):
        return _register(fit, closing, partial(_refuse_counted, feed))
    if not isinstance(feed, Loader):
        return
    steps = feed.steps(state.epoch)
    if not steps or fit._last_step - state.step < steps - state.position:
        return
    samples = feed.samples(state.epoch, steps - 1)
    if samples // world > 1:  # what the process with the fewest rows gets
        return
    _register(fit, closing, partial(_refuse_last, samples, world))


def _register(fit: Fit, closing: ExitStack, refuse: Callable[[str], None]) -> None:
    """Calls `refuse` with the name of a batch norm that gets one value of each channel for a row."""

    def look(name: str, part: nn.Module, given: tuple[Any, ...]) -> None:
        if given and part.training:
            rows, channels, *_ = given[0].shape
            # More rows than the batch has: a sample has several, each with a value of a channel.
            if given[0].numel() == rows * channels and rows <= max(fit.window.rows, 1):
                refuse(f"{name} is a {type(part).__name__} and needs two values of each channel")

    for name, part in fit.module.named_modules():
        if isinstance(part, _BatchNorm) and not isinstance(part, nn.SyncBatchNorm):
            closing.callback(part.register_forward_pre_hook(partial(look, name)).remove)


def _refuse_last(samples: int, world: int, needs: str) -> None:
    raise InvalidSetup(
        f"{needs}, and the last batch of an epoch has {samples} sample(s) for {world} process(es), which leaves one of "
        "them with a single row: give the loader drop_last=True or another batch_size"
    )


def _refuse_counted(feed: Counted, needs: str) -> None:
    """Raises InvalidSetup on every process, before one of them fails alone."""
    if feed.fewest == 1:
        raise InvalidSetup(
            f"{needs}, and a process has a batch of a single row: leave out batches that are so short "
            "(drop_last=True), or give larger ones"
        )
