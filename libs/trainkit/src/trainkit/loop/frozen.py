"""Parameters that are frozen or unfrozen during a run: one that is unfrozen must not stay untrained unnoticed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from trainkit.errors import InvalidSetup, InvalidStep

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit


class Frozen:
    """The parameters of a module that an optimizer was made without, because they were frozen."""

    def __init__(self, module: nn.Module) -> None:
        self._named = {name: p for name, p in module.named_parameters() if not p.requires_grad}

    def check(self, optimizer: Optimizer) -> None:
        """Looks whether what was unfrozen since is trained.

        Raises:
            InvalidStep: the optimizer does not have it.
        """
        unfrozen = [name for name, p in self._named.items() if p.requires_grad]
        if not unfrozen:
            return
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if lost := [name for name in unfrozen if id(self._named[name]) not in updated]:
            raise InvalidStep(
                f"{', '.join(lost[:5])} was unfrozen, and the optimizer does not have it, so it would not be trained. "
                "The optimizer gets what requires a gradient when fit begins: freeze the parameter in on_fit_start of "
                "a callback, and unfreeze it later; or add it to the optimizer with fit.optimizer.add_param_group"
            )
        for name in unfrozen:
            del self._named[name]


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
