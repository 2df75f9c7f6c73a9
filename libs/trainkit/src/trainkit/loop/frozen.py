"""Parameters that were frozen when the optimizer was made: one that is unfrozen must not stay untrained unnoticed."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from trainkit.errors import InvalidStep


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
