"""What a `Trainer` takes as `optimizer` and `schedule`, by name: factories that know what the run fills in."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainkit import catalogue
from trainkit.errors import InvalidSetup

if TYPE_CHECKING:
    from trainkit.trainer import OptimizerFactory, ScheduleFactory, Totals

Per = Literal["update", "epoch"]


@dataclass(frozen=True, slots=True)
class Group:
    """Settings for the parameters whose names match.

    Args:
        match: a pattern over parameter names as of `named_parameters`: `encoder.*`, `*.bias`.
        settings: of the optimizer, for instance `{"lr": 1e-5}`.
    """

    match: str
    settings: Mapping[str, Any]


def optimizer(
    name: str, *, groups: Sequence[Group] = (), decay_matrices_only: bool = False, **arguments: Any
) -> OptimizerFactory:
    """An optimizer by its name in the catalogue, for `Trainer(optimizer=...)`.

        Trainer(optimizer=optimizer("AdamW", lr=1e-3, decay_matrices_only=True), ...)

    Args:
        name: `AdamW`, or a path such as `torch.optim.Muon`.
        groups: settings of their own for some parameters; the first that matches decides.
        decay_matrices_only: biases, norms and other vectors get no weight decay.
        arguments: of that class.

    Raises:
        UnknownName: no such optimizer.
        WrongArguments: arguments that it does not take.
    """
    return partial(_make_optimizer, name, _checked("optimizer", name, arguments), tuple(groups), decay_matrices_only)


def schedule(name: str, *, per: Per = "update", warmup_ratio: float | None = None, **arguments: Any) -> ScheduleFactory:
    """A schedule by its name in the catalogue, for `Trainer(schedule=...)`.

    What it wants to know of the run's length (`num_training_steps`, `total_steps`) is filled in, unless given.

    Args:
        name: `LinearWithWarmup`, or a path such as `torch.optim.lr_scheduler.MultiStepLR`.
        per: what its steps are; the same as the trainer's `schedule_per`.
        warmup_ratio: `num_warmup_steps` as a share of all steps of the run.
        arguments: of that class.

    Raises:
        UnknownName: no such schedule.
        WrongArguments: arguments that it does not take.
    """
    warm_up = {} if warmup_ratio is None else {"num_warmup_steps": 0}
    checked = _checked("schedule", name, {**warm_up, **arguments})
    if warmup_ratio is not None and "num_warmup_steps" not in arguments:
        del checked["num_warmup_steps"]
    return partial(_make_schedule, name, checked, per, warmup_ratio)


def _checked(kind: str, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    known = catalogue.arguments(kind, name)
    return dict(given) if known is None else catalogue.checked(name, known, given)


def _make_optimizer(
    name: str,
    arguments: Mapping[str, Any],
    groups: Sequence[Group],
    matrices_only: bool,
    named: list[tuple[str, Parameter]],
) -> Optimizer:
    parts = parameter_groups(named, groups, decay_matrices_only=matrices_only)
    made: Optimizer = catalogue.build("optimizer", name, parts, **arguments)
    return made


def _make_schedule(
    name: str, arguments: Mapping[str, Any], per: Per, ratio: float | None, optimizer: Optimizer, totals: Totals
) -> LRScheduler:
    if ratio is not None:
        steps = totals.updates if per == "update" else totals.epochs
        arguments = {"num_warmup_steps": round(ratio * steps), **arguments}
    made: LRScheduler = catalogue.build("schedule", name, optimizer, **filled(name, totals, arguments, per=per))
    return made


def filled(name: str, totals: Totals, given: Mapping[str, Any], *, per: Per = "update") -> dict[str, Any]:
    """The arguments of a schedule together with what the run knows; given ones win.

    Raises:
        WrongArguments: a required argument is missing.
        InvalidSetup: a OneCycleLR that ends before the run.
    """
    known = catalogue.arguments("schedule", name)
    if known is None:
        return dict(given)
    steps = totals.updates if per == "update" else totals.epochs
    run = {"num_training_steps": steps, "total_steps": steps}
    if {"epochs", "steps_per_epoch"} & set(given):  # OneCycleLR: the two stand for the total
        run = {"epochs": totals.epochs, "steps_per_epoch": totals.updates_per_epoch if per == "update" else 1}
    values = {**{key: value for key, value in run.items() if key in known}, **given}
    missing = [each.name for each in known.values() if each.required and each.name not in values]
    if missing:
        raise catalogue.WrongArguments(name, [(each, "is required", "", "") for each in missing])
    if name == "OneCycleLR":
        _refuse_short_cycle(steps, values)
    return values


def _refuse_short_cycle(steps: int, values: Mapping[str, Any]) -> None:
    total = values.get("total_steps") or values["epochs"] * values["steps_per_epoch"]
    if total < steps:
        raise InvalidSetup(
            f"OneCycleLR ends after {total} steps, but the run has {steps}; leave total_steps out to have it filled in"
        )


def parameter_groups(
    named: Iterable[tuple[str, Parameter]], groups: Sequence[Group] = (), *, decay_matrices_only: bool = False
) -> list[dict[str, Any]]:
    """Parameters, grouped by the settings that they get.

    Args:
        named: as `module.named_parameters()` gives them; frozen ones are left out.
        groups: the first that matches decides.
        decay_matrices_only: parameters with fewer than two dimensions get `weight_decay=0`, unless their group sets it.

    Returns:
        `{"params": [(name, parameter), ...], **settings}` for each, in the order of their first parameter.

    Raises:
        InvalidSetup: a group has no parameter; says which name is nearest.
    """
    named = list(named)
    _refuse_unmatched(groups, [name for name, _ in named])
    found: dict[tuple[tuple[str, Any], ...], list[tuple[str, Parameter]]] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            settings = {"weight_decay": 0.0} if decay_matrices_only and parameter.ndim < 2 else {}
            settings |= next((group.settings for group in groups if fnmatch.fnmatchcase(name, group.match)), {})
            found.setdefault(tuple(settings.items()), []).append((name, parameter))
    return [{"params": members, **dict(settings)} for settings, members in found.items()]


def _refuse_unmatched(groups: Sequence[Group], names: list[str]) -> None:
    for group in groups:
        if not fnmatch.filter(names, group.match):
            near = catalogue.nearest(group.match, names)
            raise InvalidSetup(
                f"no parameter matches {group.match!r}"
                + (f"; did you mean {near}?" if near else f"; there are {names}")
            )
