"""Which series go to the tracker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from trainkit.catalogue import nearest
from trainkit.errors import InvalidSetup


@dataclass
class Monitor:
    """One switch per series."""

    learning_rate: bool = False
    epoch: bool = True
    train_loss: bool = True
    validation_loss: bool = True
    additional_metrics: bool = True
    grad_norm: bool = False
    gpu_utilization: bool = False
    cpu_utilization: bool = False
    checkpoint: bool = False

    @classmethod
    def of(cls, given: Monitor | Mapping[str, Any] | None) -> Monitor:
        """A monitor from itself, a mapping of switches, or nothing.

        Raises:
            InvalidSetup: the mapping has another switch.
        """
        if isinstance(given, Monitor):
            return given
        known = [each.name for each in fields(cls)]
        for name in given or {}:
            if name not in known:
                near = nearest(name, known)
                raise InvalidSetup(
                    f"monitor has no switch {name!r}; there are {', '.join(known)}"
                    + (f"; did you mean {near}?" if near else "")
                )
        return cls(**(given or {}))
