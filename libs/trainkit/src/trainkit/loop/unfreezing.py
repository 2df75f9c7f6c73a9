"""Parameters that are frozen or unfrozen during a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainkit.errors import InvalidSetup

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit


def train_also(fit: Fit, names: Sequence[str]) -> None:
    """Trains frozen parameters from now on: those that the optimizer does not have join its group, in this order, with
    no state. All processes call it, between two accumulation windows.

    Raises:
        InvalidSetup: the optimizer has several groups, or the strategy trains only what it began with.
    """
    fit.strategy.reshard()  # frees whole parameters: those of the module are then the optimizer's
    parameters, groups = dict(fit.module.named_parameters()), fit.optimizer.param_groups
    names = [name for name in names if not parameters[name].requires_grad]
    if not names:
        return
    held = {id(p) for group in groups for p in group["params"]}
    new = {name: parameters[name] for name in names if id(parameters[name]) not in held}
    if new and len(groups) > 1:
        raise InvalidSetup(
            f"{next(iter(new))} was unfrozen during the run, and the optimizer has {len(groups)} groups: put it into "
            "one of them from the start"
        )
    for name in names:
        parameters[name].requires_grad_(True)
    for name, p in new.items():
        p.grad = None  # of the window that is over
        groups[0]["params"].append(p)
        if "param_names" in groups[0]:
            groups[0]["param_names"].append(name)
    fit.strategy.trained_changed()


def train_no_more(fit: Fit, names: Sequence[str]) -> None:
    """Freezes parameters from now on. The optimizer keeps them and their state, and does not move them. All processes
    call it, between two accumulation windows.

    Raises:
        InvalidSetup: the strategy trains all that it began with.
    """
    fit.strategy.reshard()
    parameters = dict(fit.module.named_parameters())
    names = [name for name in names if parameters[name].requires_grad]
    if not names:
        return
    for name in names:
        parameters[name].requires_grad_(False)
        parameters[name].grad = None  # a gradient of zeros would let weight decay move it
    fit.strategy.trained_changed()
