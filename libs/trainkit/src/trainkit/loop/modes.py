"""Which parts of a module train, and which the user keeps in evaluation mode."""

from __future__ import annotations

import logging

from torch import nn

_log = logging.getLogger("trainkit")


def put_in_training_mode(module: nn.Module) -> None:
    """Puts a module in training mode. Parts that are in evaluation mode within a module that is not, such as frozen
    batch norm, stay so. A module that is in evaluation mode itself, as one that was used for inference, is put in
    training mode as a whole."""
    kept = {part: name for name, part in module.named_modules() if not part.training} if module.training else {}
    module.train()  # also when it is: a module may override it to keep parts of itself in evaluation mode
    for part in kept:
        part.training = False
    if idle := [name for part, name in kept.items() if _has_idle_dropout(part)]:
        _log.warning(
            "%s is in evaluation mode, as from_pretrained leaves a model, and stays so: its weights are trained "
            "without its dropout. Call .train() on it before fit, or freeze its parameters, if you do not want that.",
            idle[0],
        )


def _has_idle_dropout(part: nn.Module) -> bool:
    """Whether a part has weights that are trained, and dropout that its evaluation mode turns off."""
    trained = any(parameter.requires_grad for parameter in part.parameters())
    return trained and any(isinstance(each, nn.modules.dropout._DropoutNd) and each.p > 0 for each in part.modules())
