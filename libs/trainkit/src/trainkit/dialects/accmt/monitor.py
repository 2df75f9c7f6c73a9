"""Which series go to the tracker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any

from trainkit.catalogue import nearest
from trainkit.config.reading import read_yaml
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
    def from_config(cls, config: str | Path | Mapping[str, Any] | None) -> Monitor:
        """A monitor from a mapping of switches, or from a YAML or JSON file with one; None: the defaults.

        Raises:
            FileNotFoundError: there is no such file.
            InvalidSetup: there is another switch.
        """
        if isinstance(config, str | Path):
            return cls.of(read_yaml(Path(config).read_text("utf-8"), str(config)).data)
        return cls.of(config)

    @classmethod
    def of(cls, given: Monitor | Mapping[str, Any] | None) -> Monitor:
        """A monitor from itself, a mapping of switches, or nothing.

        Raises:
            InvalidSetup: the mapping has another switch.
        """
        if isinstance(given, Monitor):
            return given
        if not isinstance(given, Mapping | NoneType):
            raise InvalidSetup(f"monitor={given!r}: give a Monitor, or a mapping of its switches to True or False")
        known = [each.name for each in fields(cls)]
        for name in given or {}:
            if name not in known:
                near = nearest(name, known)
                raise InvalidSetup(
                    f"monitor has no switch {name!r}; there are {', '.join(known)}"
                    + (f"; did you mean {near}?" if near else "")
                )
        return cls(**(given or {}))
