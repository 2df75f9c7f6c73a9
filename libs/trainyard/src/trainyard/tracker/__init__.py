"""Numbers, parameters and notes of a training script, for any script: `from trainyard import tracker`.

    tracker.params({"lr": 3e-4})
    for step, batch in enumerate(batches):
        ...
        tracker.log({"train/loss": loss}, step=step)

Inside a job the numbers go to the job's run. In a plain `python train.py` they make a run of their own: they are kept
on disk, and shipped by a process of its own as soon as a yard is up on this machine.

No call here raises, blocks on the network, or starts a thread: training never fails because of its bookkeeping. What
cannot be recorded is dropped, and said once on stderr. Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainyard.tracker.session import Session

__all__ = ["finish", "log", "note", "params", "progress", "tags"]

_session = Session()

log_points = _session.log


def log(metrics: Mapping[str, float], step: int | None = None) -> None:
    """Records values under their names.

    Args:
        metrics: anything that `float()` takes; NaN and infinities are kept. A tensor on a device is waited for, so log
            numbers, not tensors, where that matters.
        step: the step they belong to. Without one, the step after the last one logged by this process.
    """
    log_points(metrics, step)


def progress(step: int, total: int | None = None) -> None:
    """Says how far training is: `step` of `total` steps (None: not known)."""
    _session.progress(step, total)


def params(values: Mapping[str, Any]) -> None:
    """Records configuration. What JSON has no word for is recorded as its `str()`."""
    _session.facts("params", dict(values))


def tags(values: Mapping[str, str]) -> None:
    """Records labels to find the run by."""
    _session.facts("tags", {str(name): str(value) for name, value in dict(values).items()})


def note(text: str) -> None:
    """Records a remark in words."""
    _session.facts("note", str(text))


def finish() -> None:
    """Ends this process's log. A call after it begins a new one; without it, the process's end does."""
    _session.finish()
