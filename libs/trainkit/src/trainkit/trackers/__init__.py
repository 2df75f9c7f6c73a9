"""Where the numbers of a run go: files, TensorBoard, MLflow, a yard, or several at once."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainkit.trackers.base import RunContext, Tracker

if TYPE_CHECKING:
    from trainkit.trackers.background import Background as Background
    from trainkit.trackers.background import LastingError as LastingError
    from trainkit.trackers.background import Row as Row
    from trainkit.trackers.files import Csv as Csv
    from trainkit.trackers.files import JsonLines as JsonLines
    from trainkit.trackers.mlflow import MLflow as MLflow
    from trainkit.trackers.tensorboard import TensorBoard as TensorBoard
    from trainkit.trackers.yard import Yard as Yard

_HOME = {
    "Background": "background",
    "Csv": "files",
    "JsonLines": "files",
    "LastingError": "background",
    "MLflow": "mlflow",
    "Row": "background",
    "TensorBoard": "tensorboard",
    "Yard": "yard",
}

__all__ = [
    "Background",
    "Csv",
    "JsonLines",
    "LastingError",
    "MLflow",
    "Row",
    "RunContext",
    "TensorBoard",
    "Tracker",
    "Yard",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"trainkit.trackers has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"trainkit.trackers.{_HOME[name]}"), name)
