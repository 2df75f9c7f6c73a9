"""Numbers, parameters and notes of a training script, for any script: `from trainyard import tracker`.

    tracker.params({"lr": 3e-4})
    for step, batch in enumerate(batches):
        ...
        tracker.log({"train/loss": loss}, step=step)

Inside a job the numbers go to the job's run. In a plain `python train.py` they make a run of their own, in which all
processes of one torchrun come together: they are kept on disk, and shipped by a process of its own as soon as a yard is
up on this machine.

No call here raises, blocks on the network, or starts a thread: training never fails because of its bookkeeping. What
cannot be recorded is dropped, and said once on stderr. Only the standard library is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainyard.tracker.session import Session

__all__ = ["active", "finish", "init", "log", "note", "params", "progress", "tags"]

_session = Session()

log_row = _session.log


def _texts(values: Mapping[str, str]) -> dict[str, str]:
    return {str(name): str(value) for name, value in dict(values).items()}


def init(
    name: str | None = None, *, params: Mapping[str, Any] | None = None, tags: Mapping[str, str] | None = None
) -> None:
    """Says what this run is. Nobody has to: the first call of anything begins the run.

    Outside of any job, each call after the first begins another run, and ends the one before as `finish` does. A job
    has one run for each attempt, however often this is called.

    Args:
        name: of a run outside of any job; to be given before anything else is recorded. A job's run has the job's name.
        params: as for `params`.
        tags: as for `tags`.
    """
    _session.init(name)
    if params is not None:
        _session.facts("params", lambda: dict(params))
    if tags is not None:
        _session.facts("tags", lambda: _texts(tags))


def active() -> bool:
    """Whether this process has an open run: it called `init` or recorded something, and did not `finish` since.

    A library that tracks for a script asks this before `init`, so that the script keeps its one run.
    """
    return _session.active


def log(metrics: Mapping[str, float], step: int | None = None) -> None:
    """Records values under their names: one row.

    A CUDA tensor of one element is never waited for: its value is copied behind the work that computes it, and the row
    is written by a later call, or by `finish`, or when the process ends in an orderly way.

    Args:
        metrics: anything that `float()` takes, at least one; NaN and infinities are kept bit by bit.
        step: the step they belong to. Without one, the step after the last one logged by this process.
    """
    log_row(metrics, step)


def progress(step: int, total: int | None = None) -> None:
    """Says how far training is: `step` of `total` steps (None: not known)."""
    _session.progress(step, total)


def params(values: Mapping[str, Any]) -> None:
    """Records configuration. What JSON has no word for is recorded as its `str()`."""
    _session.facts("params", lambda: dict(values))


def tags(values: Mapping[str, str]) -> None:
    """Records labels to find the run by."""
    _session.facts("tags", lambda: _texts(values))


def note(text: str) -> None:
    """Records a remark in words."""
    _session.facts("note", lambda: str(text))


def finish() -> None:
    """Ends this process's log; without it, the process's end does.

    `init` after it begins another run, and anything else a new log in the same run.
    """
    _session.finish()
