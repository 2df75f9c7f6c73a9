"""What is called around everything that the loop does."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainkit.callbacks.base import HOOKS, Callback

if TYPE_CHECKING:
    from trainkit.callbacks.ema import EMA as EMA
    from trainkit.callbacks.freeing import FreeMemory as FreeMemory
    from trainkit.callbacks.gradients import WatchGradients as WatchGradients
    from trainkit.callbacks.monitor import Monitor as Monitor
    from trainkit.callbacks.progress import Progress as Progress
    from trainkit.callbacks.selection import EarlyStopping as EarlyStopping
    from trainkit.callbacks.selection import KeepBest as KeepBest
    from trainkit.callbacks.stragglers import Stragglers as Stragglers
    from trainkit.callbacks.summary import Summary as Summary
    from trainkit.callbacks.weights import load_weights as load_weights

_HOME = {
    "EMA": "ema",
    "EarlyStopping": "selection",
    "FreeMemory": "freeing",
    "KeepBest": "selection",
    "Monitor": "monitor",
    "Progress": "progress",
    "Stragglers": "stragglers",
    "Summary": "summary",
    "WatchGradients": "gradients",
    "load_weights": "weights",
}

__all__ = [
    "EMA",
    "HOOKS",
    "Callback",
    "EarlyStopping",
    "FreeMemory",
    "KeepBest",
    "Monitor",
    "Progress",
    "Stragglers",
    "Summary",
    "WatchGradients",
    "load_weights",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"trainkit.callbacks has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"trainkit.callbacks.{_HOME[name]}"), name)
