"""What `Fit` is made of, before the first step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, NamedTuple

from torch import nn

from trainkit.data.counted import Plain
from trainkit.data.feed import Feed
from trainkit.durations import Duration, Steps
from trainkit.errors import InvalidSetup
from trainkit.loop.length import total_steps
from trainkit.state import State
from trainkit.trackers.base import RunContext
from trainkit.trackers.clock import Clock
from trainkit.trainer import Totals, Trainer

_log = logging.getLogger("trainkit")


class Tail(NamedTuple):
    """What follows a step and comes after the logging of its loss.

    Args:
        evaluates: an evaluation is due.
        last: it was the last step of its epoch.
        saves: a checkpoint is due, whatever the counters say: they did when an evaluation was cut short.
    """

    evaluates: bool
    last: bool
    saves: bool = False


def is_on_meta(module: nn.Module) -> bool:
    """Whether a tensor of the module has no values yet."""
    return any(tensor.is_meta for tensor in chain(module.parameters(), module.buffers()))


def noted(call: Callable[..., None], *arguments: Any) -> None:
    """Calls what is told of an error; when that fails in turn, it is written to the log and the error stays."""
    try:
        call(*arguments)
    except Exception:
        _log.exception("while the run was ending with an error, another one")


def named_sets(evaluate: Any) -> Mapping[str, Any]:
    if evaluate is None:
        return {}
    return evaluate if isinstance(evaluate, Mapping) else {"val": evaluate}


def refuse_shared(feed: Feed, sets: Mapping[str, Any]) -> None:
    """Refuses to evaluate on the training data itself where that would move training's place in it.

    Raises:
        InvalidSetup: a set is the training data, and that serves one iterator at a time.
    """
    if not isinstance(feed, Plain) or not feed.serves_one_iterator:
        return
    if (name := next((name for name, source in sets.items() if source is feed.iterable), None)) is not None:
        raise InvalidSetup(
            f"the evaluation set {name!r} is the training data itself, a {type(feed.iterable).__name__}, which serves "
            "one iterator at a time: give another one of the same data, or a trainkit.data.Loader"
        )


def warn_of_resuming(feed: Feed) -> None:
    """Logs a warning when the checkpoints of a run will be of no use within an epoch of its data."""
    if isinstance(feed, Plain) and (problem := feed.resume_problem()) is not None:
        _log.warning("this run can resume from checkpoints at the end of an epoch alone: %s", problem)


def run_context(trainer: Trainer, resumed_step: int | None, resumed_time: float | None, world_size: int) -> RunContext:
    """What trackers are told."""
    return RunContext(
        name=trainer.name,
        folder=trainer.checkpoints.place() if trainer.checkpoints is not None else None,
        parameters=trainer.parameters,
        resumed_step=resumed_step,
        resumed_time=resumed_time,
        world_size=world_size,
        clock=Clock(resumed_time),
    )


def totals(feed: Feed, max_duration: Duration, accumulate: int) -> Totals:
    """How long a run will be.

    Raises:
        InvalidSetup: neither the data nor the duration says.
    """
    steps = feed.steps(0)
    if steps is None and not isinstance(max_duration, Steps):
        raise InvalidSetup("a schedule needs to know the length of the run: give max_duration in steps, as in '1000st'")
    per_epoch = -(-(steps or 1) // accumulate)
    count, unit = max_duration.count, max_duration.unit
    if unit == "ep":
        return Totals(count * per_epoch, count, per_epoch)
    if unit == "up":
        return Totals(count, -(-count // per_epoch), per_epoch)
    total = total_steps(feed, max_duration, State(), accumulate=accumulate)
    if total is None:
        raise InvalidSetup(
            f"max_duration={max_duration} does not say how many updates there will be: with a schedule, use "
            "epochs, steps or updates, or samples of a Loader"
        )
    whole, rest = divmod(total, steps) if steps is not None else (0, total)
    return Totals(whole * per_epoch + -(-rest // accumulate), whole + bool(rest), per_epoch)
