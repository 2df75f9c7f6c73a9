"""trainkit: the training library. One loop, exact to resume, from one CPU to FSDP and DeepSpeed.

Names are imported when they are first used, so that `import trainkit` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainkit.callbacks.base import Callback as Callback
    from trainkit.checkpoints.policy import Best as Best
    from trainkit.checkpoints.policy import Checkpoints as Checkpoints
    from trainkit.durations import Epochs as Epochs
    from trainkit.durations import Samples as Samples
    from trainkit.durations import Steps as Steps
    from trainkit.durations import Tokens as Tokens
    from trainkit.durations import Updates as Updates
    from trainkit.initial.weights import Weights as Weights
    from trainkit.module import Loss as Loss
    from trainkit.trackers.base import Tracker as Tracker
    from trainkit.trainer import Totals as Totals
    from trainkit.trainer import Trainer as Trainer

_HOME = {
    "Best": "checkpoints.policy",
    "Callback": "callbacks.base",
    "Checkpoints": "checkpoints.policy",
    "Epochs": "durations",
    "Loss": "module",
    "Samples": "durations",
    "Steps": "durations",
    "Tokens": "durations",
    "Totals": "trainer",
    "Tracker": "trackers.base",
    "Trainer": "trainer",
    "Updates": "durations",
    "Weights": "initial.weights",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    try:
        module = import_module(f"trainkit.{_HOME[name]}")
    except KeyError:
        raise AttributeError(f"module 'trainkit' has no attribute {name!r}; it has {', '.join(__all__)}") from None
    return getattr(module, name)
