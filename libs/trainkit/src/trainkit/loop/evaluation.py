"""A round of evaluation: every sample counts once, however batches and processes divide the sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from trainkit.data.feed import Feed
from trainkit.errors import InvalidStep
from trainkit.loop.losses import Mean, loss_of
from trainkit.loop.places import END
from trainkit.metrics.base import Metric

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit


Look: TypeAlias = Callable[[int, int], None]
"""Asked between two batches, with the number of the set and the batches done of it."""


def run(fit: Fit, sets: Mapping[str, Feed], metrics: Mapping[str, Metric], look: Look | None) -> dict[str, float]:
    """The results of all sets, by `SET/NAME`; the same numbers on every process. `look` may end it by an exception."""
    fit.strategy.settle()
    results: dict[str, float] = {}
    with evaluating(fit), torch.no_grad():
        for at, (name, feed) in enumerate(sets.items()):
            asked = partial(look, at) if look is not None else _nobody
            values = _one(fit, name, feed, metrics, asked)
            results.update({f"{name}/{key}": value for key, value in values.items()})
    return results


@contextmanager
def evaluating(fit: Fit) -> Iterator[None]:
    """All of the module in evaluation mode; afterwards every part is in the mode in which it was, and holds shards
    where it did: who reads or writes parameters then has the live ones."""
    with in_evaluation_mode(fit.module):
        try:
            yield
        finally:
            fit.strategy.reshard()


@contextmanager
def in_evaluation_mode(module: nn.Module) -> Iterator[None]:
    """All of a module in evaluation mode; afterwards every part is in the mode in which it was."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _nobody(batch: int) -> None:
    """Nobody wants to leave."""


def _one(
    fit: Fit, name: str, feed: Feed, metrics: Mapping[str, Metric], look: Callable[[int], None]
) -> dict[str, float]:
    mean, counted = Mean(fit.strategy.device), False
    starts, ends = fit._hooks.on_evaluation_step_start, fit._hooks.on_evaluation_step_end
    evaluate = fit.strategy.evaluate if fit.recovery is None else fit.recovery.evaluation_step
    look(0)
    for position, batch in enumerate(fit.placed(feed.batches(0))):
        for hook in starts:
            hook(fit, name, batch)
        output = evaluate(batch)
        rows = feed.rows(0, position)
        if not isinstance(output, Mapping) or "loss" in output:
            mean.add(loss_of(output, "evaluation_step"), rows)
            counted = True
        if rows:
            _update(metrics, output, name)
        for hook in ends:
            hook(fit, name)
        look(position + 1)
    look(END)  # before the processes meet
    if fit.recovery is not None:
        fit.recovery.agree()
    results = _computed(metrics)
    if counted:
        total, weight = mean.over(fit.strategy)
        results["loss"] = total / weight if weight else float("nan")
    return results


def _update(metrics: Mapping[str, Metric], output: Any, name: str) -> None:
    for key, metric in metrics.items():
        if not isinstance(output, Mapping) or key not in output:
            raise InvalidStep(
                f"evaluation_step returned nothing for the metric {key!r} on {name!r}: return a mapping with "
                f"{key!r}: the values that its update takes"
            )
        values = output[key]
        metric.update(*values if isinstance(values, (tuple, list)) else (values,))


def _computed(metrics: Mapping[str, Metric]) -> dict[str, float]:
    results: dict[str, float] = {}
    for key, metric in metrics.items():
        value = metric.compute()
        if isinstance(value, Mapping):
            results.update({f"{key}/{part}": _number(key, number) for part, number in value.items()})
        else:
            results[key] = _number(key, value)
        metric.reset()
    return results


def _number(metric: str, value: Tensor | float) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise InvalidStep(
            f"the metric {metric!r} computed a tensor of shape {tuple(value.shape)}: give a number, or a mapping"
        )
    return float(value)
