"""Finds how much fits."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace

from trainkit.data.loader import Loader
from trainkit.durations import Steps
from trainkit.errors import InvalidSetup, OutOfMemory
from trainkit.loop.recovery import is_out_of_memory
from trainkit.memory import free
from trainkit.trainer import Trainer

_log = logging.getLogger("trainkit")


def largest_batch_size(
    make: Callable[[int], Trainer], *, start: int = 1, most: int | None = None, steps: int = 3
) -> int:
    """The largest batch size with which a run fits into memory.

        size = largest_batch_size(lambda size: trainer(batch_size=size))

    Sizes are doubled until one does not fit; then the gap is halved until it is a sixteenth of the size. Every try
    trains a new trainer for some steps, whose callbacks, trackers, checkpoints and evaluations are left out: what it
    learns is thrown away.

    Args:
        make: a new trainer, with a new module and a `Loader`, for a batch size.
        start: the first size to try.
        most: the largest one; default: the whole dataset.
        steps: of each try. The second step has the optimizer's state as well.

    Returns:
        The size for one process. With several of the same kind, their batch is as many times as large.

    Raises:
        InvalidSetup: this is one of several processes, or the trainer's data is no `Loader`.
        OutOfMemory: not even `start` fits.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InvalidSetup("largest_batch_size runs in one process: find the size there, and multiply it")
    if start < 1 or steps < 1:
        raise InvalidSetup(f"start={start} and steps={steps} have to be at least 1")
    limit = _limit(make(start), most)
    size, good = min(start, limit), 0
    while _fits(make, size, steps):
        good = size
        if size == limit:
            return good
        size = min(2 * size, limit)
    if not good:
        raise OutOfMemory(f"not even a batch of {size} fits into memory: give a smaller start, or a smaller model")
    bad = size
    while bad - good > max(1, good // 16):
        size = (good + bad) // 2
        good, bad = (size, bad) if _fits(make, size, steps) else (good, size)
    return good


def _limit(trainer: Trainer, most: int | None) -> int:
    if not isinstance(trainer.train, Loader):
        raise InvalidSetup(f"the training data is a {type(trainer.train).__name__}: give a Loader with the batch size")
    samples = len(trainer.train.dataset)  # type: ignore[arg-type]
    return samples if most is None else min(samples, most)


def _fits(make: Callable[[int], Trainer], size: int, steps: int) -> bool:
    fits = _tried(make, size, steps)
    if not fits:  # what earlier tries left may have been in the way
        free()
        fits = _tried(make, size, steps)
    _log.info("a batch of %d %s into memory", size, "fits" if fits else "does not fit")
    return fits


def _tried(make: Callable[[int], Trainer], size: int, steps: int) -> bool:
    try:
        _bare(make(size), steps).fit()
    except (RuntimeError, MemoryError, OutOfMemory) as error:
        if not is_out_of_memory(error) and not isinstance(error, OutOfMemory):
            raise
        return False
    return True


def _bare(trainer: Trainer, steps: int) -> Trainer:
    """Only what takes memory in a step."""
    return replace(
        trainer,
        max_duration=Steps(steps),
        callbacks=(),
        trackers=(),
        checkpoints=None,
        evaluate=None,
        schedule=None,
        schedule_monitor=None,
        out_of_memory="raise",
        non_finite="ignore",
        log_every=None,
        accumulate=1,
    )
