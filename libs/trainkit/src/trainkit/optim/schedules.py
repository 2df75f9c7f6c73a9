"""Schedules with a warm-up, each a pure function of the number of updates done.

The learning rate of an update depends on nothing but its number, so a resumed run continues with the same bits. Beside
them, any schedule of torch's can be used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from trainkit.errors import InvalidSetup

__all__ = [
    "Constant",
    "ConstantWithWarmup",
    "CosineWithHardRestartsWithWarmup",
    "CosineWithWarmup",
    "InverseSQRT",
    "LinearWithWarmup",
    "PolynomialDecayWithWarmup",
]

_TIMESCALE_WITHOUT_WARMUP = 10_000


def _warm(update: int, warmup: int, after: Callable[[int], float]) -> float:
    return update / max(1, warmup) if update < warmup else after(update)


def _progress(update: int, warmup: int, total: int) -> float:
    return (update - warmup) / max(1, total - warmup)


def _always(_update: int) -> float:
    return 1.0


def _linear(update: int, warmup: int, total: int) -> float:
    return max(0.0, 1.0 - _progress(update, warmup, total))


def _cosine(update: int, warmup: int, total: int, cycles: float) -> float:
    return max(0.0, 0.5 * (1.0 + math.cos(2.0 * math.pi * cycles * _progress(update, warmup, total))))


def _cosine_with_restarts(update: int, warmup: int, total: int, cycles: int) -> float:
    progress = _progress(update, warmup, total)
    return 0.0 if progress >= 1.0 else 0.5 * (1.0 + math.cos(math.pi * ((cycles * progress) % 1.0)))


def _inverse_sqrt(update: int, warmup: int, timescale: int) -> float:
    return 1.0 / math.sqrt((update + timescale - warmup) / timescale)


def _polynomial(update: int, warmup: int, total: int, end: float, power: float) -> float:
    """`end` is the last rate as a share of the first."""
    remaining = 1.0 - min(1.0, _progress(update, warmup, total))
    return (1.0 - end) * math.pow(remaining, power) + end


class _Warmed(LambdaLR):
    """The optimizer's rate times a factor that rises linearly from 0 to 1 during the warm-up, then follows `after`."""

    def __init__(self, optimizer: Optimizer, warmup: int, *after: Callable[[int], float], last_epoch: int = -1) -> None:
        _refuse_negative("num_warmup_steps", warmup)
        factors: list[Callable[[int], float]] = [partial(_warm, warmup=warmup, after=each) for each in after]
        super().__init__(optimizer, factors if len(factors) > 1 else factors[0], last_epoch)


class Constant(LambdaLR):
    """The optimizer's own rate, always."""

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1) -> None:
        super().__init__(optimizer, _always, last_epoch)


class ConstantWithWarmup(_Warmed):
    """Warm-up, then the optimizer's own rate. The first update has rate 0."""

    def __init__(self, optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> None:
        super().__init__(optimizer, num_warmup_steps, _always, last_epoch=last_epoch)


class LinearWithWarmup(_Warmed):
    """Warm-up, then linearly down to 0 at `num_training_steps`."""

    def __init__(
        self, optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int, last_epoch: int = -1
    ) -> None:
        after = partial(_linear, warmup=num_warmup_steps, total=num_training_steps)
        super().__init__(optimizer, num_warmup_steps, after, last_epoch=last_epoch)


class CosineWithWarmup(_Warmed):
    """Warm-up, then `num_cycles` waves of a cosine: half a wave, the default, goes down to 0 at the end."""

    def __init__(
        self,
        optimizer: Optimizer,
        num_warmup_steps: int,
        num_training_steps: int,
        num_cycles: float = 0.5,
        last_epoch: int = -1,
    ) -> None:
        after = partial(_cosine, warmup=num_warmup_steps, total=num_training_steps, cycles=num_cycles)
        super().__init__(optimizer, num_warmup_steps, after, last_epoch=last_epoch)


class CosineWithHardRestartsWithWarmup(_Warmed):
    """Warm-up, then `num_cycles` half waves of a cosine, each from the full rate down to 0."""

    def __init__(
        self,
        optimizer: Optimizer,
        num_warmup_steps: int,
        num_training_steps: int,
        num_cycles: int = 1,
        last_epoch: int = -1,
    ) -> None:
        after = partial(_cosine_with_restarts, warmup=num_warmup_steps, total=num_training_steps, cycles=num_cycles)
        super().__init__(optimizer, num_warmup_steps, after, last_epoch=last_epoch)


class InverseSQRT(_Warmed):
    """Warm-up, then down with the inverse square root of the updates done.

    `timescale` is the number of warm-up updates unless given, or 10,000 when there is no warm-up.
    """

    def __init__(
        self, optimizer: Optimizer, num_warmup_steps: int, timescale: int | None = None, last_epoch: int = -1
    ) -> None:
        scale = timescale or num_warmup_steps or _TIMESCALE_WITHOUT_WARMUP
        after = partial(_inverse_sqrt, warmup=num_warmup_steps, timescale=scale)
        super().__init__(optimizer, num_warmup_steps, after, last_epoch=last_epoch)


class PolynomialDecayWithWarmup(_Warmed):
    """Warm-up, then down to `lr_end` at `num_training_steps` as a polynomial of degree `power`, and there it stays.

    Raises:
        InvalidSetup: `lr_end` is not below the optimizer's rate.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        num_warmup_steps: int,
        num_training_steps: int,
        lr_end: float = 1e-7,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        if lr_end >= min(rates):
            raise InvalidSetup(
                f"lr_end has to be below the optimizer's learning rate {min(rates):g}, but is {lr_end:g}"
            )
        shape = partial(_polynomial, warmup=num_warmup_steps, total=num_training_steps, power=power)
        after = [partial(shape, end=lr_end / rate) for rate in rates]
        super().__init__(optimizer, num_warmup_steps, *after, last_epoch=last_epoch)


def _refuse_negative(name: str, value: int) -> None:
    if value < 0:
        raise InvalidSetup(f"{name} has to be 0 or more, but is {value}")
