"""Configurations back to files: what a run really used, defaults included."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.callbacks.base import Callback
from trainkit.config.components import Component

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit

FILE = "config.yaml"


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as plain data; `from_dict` turns it back."""
    return {each.name: _plain(getattr(config, each.name)) for each in dataclasses.fields(config)}


def to_yaml(config: Any) -> str:
    """A configuration as the text of a file."""
    from ruamel.yaml import YAML

    yaml: Any = YAML(typ="safe", pure=True)
    text = io.StringIO()
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output = False, False
    yaml.dump(to_dict(config), text)
    return text.getvalue()


def save(config: Any, folder: str | Path, name: str = FILE) -> Path:
    """Writes a file into a folder: the whole file appears, or none.

    Returns:
        The file's path.
    """
    target = Path(folder) / name
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{name}.{os.getpid()}")
    partial.write_text(to_yaml(config), "utf-8")
    partial.replace(target)
    return target


class SavedConfig(Callback):
    """Saves a configuration beside the run's checkpoints when training begins."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def on_fit_start(self, fit: Fit) -> None:
        policy = fit.trainer.checkpoints
        if policy is not None and fit.strategy.is_main:
            save(self._config, policy.place())


def _plain(value: Any) -> Any:
    if isinstance(value, Component):
        return _plain(value.to_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value
