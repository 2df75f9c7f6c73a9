"""The settings of a run as its checkpoints store them, so that a resumed run can compare its own."""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from trainkit.data.loader import Loader
from trainkit.data.streams import Stream
from trainkit.durations import AnyDuration, duration
from trainkit.loop.plan import functions, steps_of

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit

CHECKPOINT_DECIDES = ("seed", "shuffle", "samples", "order", "batch_size", "drop_last", "accumulate")
"""What decides which samples a step gets and what they count: it stays as in the checkpoint, unless accepted."""

CODE_DECIDES = (
    "max_duration",
    "schedule_total",
    "schedule_per",
    "schedule_monitor",
    "clip_norm",
    "log_every",
    "evaluate_every",
    "checkpoint_every",
    "check_sync_every",
    "precision",
    "weights",
    "non_finite",
    "zero_gradients",
    "cast_batches",
    "deterministic",
    "strategy",
    "device",
    "torch",
)
"""What a resumed run may change; it reports the old and the new value."""


def described(fit: Fit) -> dict[str, Any]:
    """The settings of a run, as plain values."""
    trainer, strategy, plan = fit.trainer, fit.strategy, fit.plan
    policy = trainer.checkpoints
    stage = strategy.describe().get("stage")
    return {
        "seed": trainer.seed,
        "accumulate": trainer.accumulate,
        **_of_data(fit),
        "max_duration": _text(trainer.max_duration),
        "schedule_total": _text(trainer.schedule_total),
        "schedule_per": plan.per if fit.schedule is not None else None,
        "schedule_monitor": trainer.schedule_monitor,
        "clip_norm": trainer.clip_norm,
        "log_every": _text(trainer.log_every),
        "evaluate_every": _text(trainer.evaluate_every),
        "checkpoint_every": _text(policy.every if policy is not None else None),
        "check_sync_every": _text(trainer.check_sync_every),
        "precision": trainer.precision,
        "weights": plan.weights,
        "non_finite": trainer.non_finite,
        "zero_gradients": trainer.zero_gradients,
        "cast_batches": trainer.cast_batches,
        "deterministic": trainer.deterministic,
        "strategy": strategy.name if stage is None else f"{strategy.name}, stage {stage}",
        "device": strategy.device.type,
        "torch": str(torch.__version__),
        "world_size": strategy.world_size,
        "optimizer": plan.groups,
        "schedule": plan.initial,
        "totals": None if plan.totals is None else [plan.totals.updates, plan.totals.epochs],
        "factors": factors(fit.schedule) if fit.schedule is not None else [],
        "callbacks": {each.name: dict(each.settings) for each in trainer.callbacks if each.settings},
    }


def _of_data(fit: Fit) -> dict[str, Any]:
    feed = fit.feed
    if isinstance(feed, Loader):
        return {"shuffle": feed.shuffle, "drop_last": feed.drop_last}
    if isinstance(feed, Stream):
        return {"batch_size": feed.batch_size, "drop_last": feed.drop_last}
    source = getattr(feed, "iterable", None)
    if isinstance(source, DataLoader) and source.batch_size is not None:
        return {"batch_size": source.batch_size * fit.strategy.world_size, "drop_last": source.drop_last}
    return {}


def factors(schedule: Any) -> list[list[list[float]]]:
    """The functions of the step that a schedule has, which are not stored: for each its values at some steps so far.
    One that keeps a state is not called, because a call may change it."""
    found: list[list[list[float]]] = []
    for function, owner in functions(schedule):
        pure = isinstance(function, FunctionType) or not getattr(function, "__dict__", None)
        found.append([[at, float(function(at))] for at in _some(steps_of(owner))] if pure else [])
    return found


def same_factors(schedule: Any, stored: list[list[list[float]]]) -> bool:
    """Whether a schedule's functions have the values that `factors` found."""
    present = [function for function, _ in functions(schedule)]
    return len(present) == len(stored) and all(
        float(function(int(at))) == value
        for function, values in zip(present, stored, strict=True)
        for at, value in values
    )


def _some(steps: int) -> list[int]:
    """The steps at which functions are compared: `steps`, its half, the half of that, and so on, and 0."""
    found = []
    while steps > 0:
        found.append(steps)
        steps //= 2
    return [*found, 0]


def _text(value: AnyDuration | None) -> str | None:
    return None if value is None else str(duration(value))
