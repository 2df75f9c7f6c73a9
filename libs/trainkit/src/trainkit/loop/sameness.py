"""What a run has to have in common with the checkpoint that it goes on from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.data.loader import Loader
from trainkit.errors import WrongCheckpoint
from trainkit.loop import settings
from trainkit.loop.changes import Changes, compare

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit

_log = logging.getLogger("trainkit")


def described(fit: Fit) -> dict[str, Any]:
    """What a checkpoint says of its run, for `settle`."""
    about: dict[str, Any] = {"schedule": type(fit.schedule).__name__ if fit.schedule is not None else None}
    if isinstance(fit.feed, Loader):
        epoch = fit.state.epoch
        about |= {"batch_size": fit.feed.batch_size, "samples": fit.feed.length(epoch)}
        about["order"] = fit.feed.order_digest(epoch)
    return about


def settle(fit: Fit, path: Path, state: Mapping[str, Any]) -> Changes:
    """Compares a checkpoint's state with a run that already has its counters.

    Returns:
        What the run's settings change.

    Raises:
        WrongCheckpoint: the run has other weights, another schedule, or other settings that the checkpoint decides.
    """
    if gone := sorted(state["model"].keys() - fit.strategy.weights().keys()):
        raise WrongCheckpoint(
            f"{path} has {', '.join(gone[:5])}, which the module has not: it belongs to another model"
        )
    now, before = described(fit), state.get("about", {})
    if before.get("schedule", now["schedule"]) != now["schedule"]:
        raise WrongCheckpoint(
            f"{path} was made with {before['schedule'] or 'no schedule'} and this run has "
            f"{now['schedule'] or 'none'}: go on with the same, or begin another run from the checkpoint's weights "
            "(trainkit.checkpoints.export)"
        )
    changes = compare(fit, path, {**now, **settings.described(fit)}, {**before, **state.get("settings", {})})
    if fit.state.position and {"batch_size", "samples"} <= before.keys() & now.keys():
        _settle_position(fit, path, before, now)
    return changes


def _settle_position(fit: Fit, path: Path, before: Mapping[str, int], now: Mapping[str, int]) -> None:
    """Goes on at the same sample of the epoch, or, when the batches' borders are others, at most a batch before it."""
    done, state = fit.state.position * before["batch_size"], fit.state
    if done >= now["samples"] or (state.window and before["batch_size"] != now["batch_size"]):
        raise WrongCheckpoint(
            f"{path} was made within an epoch, after {done} of {before['samples']} samples in batches of "
            f"{before['batch_size']}; this run has {now['samples']} samples in batches of {now['batch_size']}, and "
            "cannot continue there: resume with the same data, or from a checkpoint at the end of an epoch"
        )
    if before["batch_size"] == now["batch_size"]:
        return
    state.position = done // now["batch_size"]
    again = done - state.position * now["batch_size"]
    _log.warning(
        "batches had %d samples and have %d: %d samples of the epoch were done, and the last %d of them come again",
        *(before["batch_size"], now["batch_size"], done, again),
    )
