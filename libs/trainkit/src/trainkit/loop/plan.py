"""The optimizer and the schedule as the code gives them, before anything is read from a checkpoint.

A checkpoint stores this, so that a resumed run can tell a setting that was changed from a value that training changed,
and can evaluate the schedule at any step.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trainkit.durations import Duration, duration
from trainkit.errors import InvalidSetup
from trainkit.trainer import Totals, Trainer

_MEMBERS = ("params", "param_names")
_MOST_VALUES = 64
"""Longer tensors in a group or a schedule are data, not settings."""


class Plan:
    """Makes optimizer and schedule, and remembers what they were made with.

    Attributes:
        weights: the types of the trained parameters.
        groups: for each parameter group the names of its parameters and its settings, as plain values.
        initial: the schedule's settings before its first step, as plain values; None without a schedule.
        totals: what the schedule was made with.
        per: what the schedule steps with: `update`, `epoch` or `evaluation`.
        managed: the settings of groups that the schedule changes.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.weights = ""
        self.groups: list[dict[str, Any]] = []
        self.initial: dict[str, Any] | None = None
        self.totals: Totals | None = None
        self.per: str = trainer.schedule_per
        self.managed: set[str] = set()
        self._configured: list[dict[str, Any]] = []
        self._length = 0

    def make_optimizer(self, named: list[tuple[str, Parameter]]) -> Optimizer:
        """The trainer's optimizer.

        Raises:
            InvalidSetup: the loop cannot step what the trainer's factory returned.
        """
        made = self._trainer.optimizer(named)
        _check_optimizer(made)
        self.weights = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for _, p in named}))
        names = {id(p): name for name, p in named}
        for group in made.param_groups:
            settings = {key: value for key, value in group.items() if key not in _MEMBERS}
            self._configured.append(_copied(settings))
            self.groups.append({"names": [names.get(id(p), "") for p in group["params"]], **plain(settings)})
        return made

    @property
    def duration(self) -> Duration:
        """How long the schedule is planned to be."""
        return duration(self._trainer.schedule_total or self._trainer.max_duration)

    def make_schedule(self, optimizer: Optimizer, totals: Callable[[Duration], Totals]) -> Any:
        """The trainer's schedule, or None.

        Args:
            totals: says what a duration stands for.

        Raises:
            InvalidSetup: the loop cannot step what the trainer's factory returned, or the run is longer than it.
        """
        monitor = self._trainer.schedule_monitor
        if self._trainer.schedule is None:
            if monitor is not None:
                raise InvalidSetup(
                    f"schedule_monitor={monitor!r} without a schedule: give schedule=..., or leave it out"
                )
            return None
        self.totals = totals(self.duration)
        made = self._trainer.schedule(optimizer, self.totals)
        _check_schedule(made, monitor)
        if isinstance(made, ReduceLROnPlateau):
            self.per = "evaluation"
        self._length = self.length(self.totals)
        _refuse_short(made, self._length)
        for group, before in zip(optimizer.param_groups, self._configured, strict=True):
            self.managed |= {key for key in group if key not in _MEMBERS and key not in before}
            self.managed |= {key for key, value in before.items() if plain(group[key]) != plain(value)}
        self.managed.add("lr")
        self.initial = described(made)
        return made

    def at(self, optimizer: Optimizer, totals: Totals, steps: int) -> Any:
        """A new schedule as it is after so many steps of a run that was planned with these totals from its start. The
        groups' settings are then as in such a run too."""
        assert self._trainer.schedule is not None
        for group, before in zip(optimizer.param_groups, self._configured, strict=True):
            for key in self.managed - before.keys():
                group.pop(key, None)
            group.update(_copied(before))
        made = self._trainer.schedule(optimizer, totals)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch misses the optimizer's steps between those of the schedule
            self._length = self.length(totals)
            for _ in range(steps):
                if self.ended(made):
                    break
                made.step()
        return made

    def ended(self, schedule: Any) -> bool:
        """Whether the schedule reached the `schedule_total` of the trainer: its rate then stays."""
        if self._trainer.schedule_total is None or self.per == "evaluation":
            return False
        cycle = getattr(schedule, "total_steps", None)  # a OneCycleLR has its last rate one step before its total
        end = min(self._length, cycle - 1) if isinstance(cycle, int) else self._length
        return steps_of(schedule) >= end

    def length(self, totals: Totals) -> int:
        """How many steps of the schedule the totals stand for."""
        return totals.epochs if self.per == "epoch" else totals.updates


def steps_of(schedule: Any) -> int:
    """How often a schedule was stepped."""
    if hasattr(schedule, "last_epoch"):
        return int(schedule.last_epoch)
    within = getattr(schedule, "_schedulers", ())  # ChainedScheduler does not count by itself
    return steps_of(within[0]) if within else 0


def described(schedule: Any) -> dict[str, Any]:
    """A schedule's state and the arguments of its functions, as plain values."""
    return {"state": plain(schedule.state_dict()), "functions": [_arguments(each) for each, _ in functions(schedule)]}


def functions(schedule: Any) -> Iterator[tuple[Callable[[int], float], Any]]:
    """The functions of the step that a schedule, or one within it, multiplies rates by, each with that schedule."""
    yield from ((function, schedule) for function in getattr(schedule, "lr_lambdas", ()))
    for within in getattr(schedule, "_schedulers", ()):
        yield from functions(within)


def _arguments(function: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if not isinstance(function, partial):
        return found
    for key, value in function.keywords.items():
        found |= _arguments(value) if isinstance(value, partial) else {key: plain(value)}
    return found


def plain(value: Any) -> Any:
    """A value as JSON has it. What is no setting (a function, an object) counts as None."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return value.tolist() if value.numel() <= _MOST_VALUES else None
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None


def _copied(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in settings.items()}


def _check_optimizer(made: Any) -> None:
    if isinstance(made, list | tuple):
        raise InvalidSetup(
            f"optimizer makes a {type(made).__name__} of {len(made)} optimizers, and a run has one: make one with a "
            "parameter group for each part, so that each has settings of its own (trainkit.optim.Group)"
        )
    if not isinstance(made, Optimizer):
        raise InvalidSetup(
            f"optimizer makes a {type(made).__name__}: make a torch.optim.Optimizer from the named parameters, for "
            "instance with partial(torch.optim.AdamW, lr=1e-3)"
        )
    if (needed := _needed(made.step)) is not None:
        raise InvalidSetup(
            f"{type(made).__name__} calls a {needed} that computes the loss several times in one update, and the loop "
            "computes it once: use an optimizer that needs none, such as AdamW or SGD, or a training loop of your own"
        )


def _check_schedule(made: Any, monitor: str | None) -> None:
    kind = type(made).__name__
    missing = [name for name in ("step", "state_dict", "load_state_dict") if not callable(getattr(made, name, None))]
    if missing:
        raise InvalidSetup(
            f"schedule makes a {kind}, which has no {missing[0]}: make one schedule of torch.optim.lr_scheduler or "
            "trainkit.optim; several become one with SequentialLR or ChainedScheduler"
        )
    if isinstance(made, ReduceLROnPlateau):
        if monitor is None:
            raise InvalidSetup(
                "ReduceLROnPlateau steps with a result of each evaluation: name it, for instance with "
                "Trainer(schedule_monitor='val/loss')"
            )
        return
    if monitor is not None:
        raise InvalidSetup(
            f"schedule_monitor={monitor!r} is for ReduceLROnPlateau, and {kind} takes no result: leave it out"
        )
    if (needed := _needed(made.step)) is not None:
        raise InvalidSetup(
            f"{kind}.step needs {needed!r}, which the loop does not know: make a schedule that is a function of its "
            "steps, or ReduceLROnPlateau with schedule_monitor"
        )


def _needed(call: Callable[..., Any]) -> str | None:
    """The first parameter that a call has to be given."""
    for name, each in inspect.signature(call).parameters.items():
        if each.default is each.empty and each.kind in (
            each.POSITIONAL_ONLY,
            each.POSITIONAL_OR_KEYWORD,
            each.KEYWORD_ONLY,
        ):
            return name
    return None


def _refuse_short(made: Any, steps: int) -> None:
    total = getattr(made, "total_steps", None)
    if isinstance(made, LRScheduler) and isinstance(total, int) and total < steps:
        raise InvalidSetup(
            f"{type(made).__name__} ends after {total} steps, but the run has {steps}: make it with totals.updates, or "
            "give Trainer(schedule_total=...), after which the rate stays"
        )
