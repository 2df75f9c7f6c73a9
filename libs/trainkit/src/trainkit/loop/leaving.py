"""The end that a signal asked for: at a place between two steps, or within an evaluation, which is then done again."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from trainkit import random
from trainkit.errors import Interrupted
from trainkit.loop.parts import Tail
from trainkit.loop.places import after_step
from trainkit.loop.signals import Left

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit


def evaluate(fit: Fit, tail: Tail | None = None, late: bool = False) -> None:
    """An evaluation of the loop's own, which a signal can cut short. The run then ends as it was before it.

    Args:
        tail: of the step that it follows.
        late: it is the one after the last step.
    """
    before = random.capture(fit.strategy.device)
    try:
        fit._results(fit._signals.watch(late))
    except Left:
        random.restore(before, fit.strategy.device)
        for metric in fit.trainer.metrics.values():
            metric.reset()
        fit.call("on_evaluation_left")
        if tail is not None:
            fit.left = tail._replace(saves=tail.saves or fit.due.saves(fit.state))
        leave(fit)


def interrupt(fit: Fit) -> None:
    """Ends the run if all processes end it at this step, and its gradients can be stored."""
    within = fit.state.window > 0 and not fit.strategy.stores_window
    if fit._signals.reached(after_step(fit.state.step)) and not within:
        leave(fit)


def leave(fit: Fit) -> NoReturn:
    """Ends the run with a last checkpoint, if it has any."""
    fit.interrupted = True
    fit._signals.meet()
    try:
        if fit._keeper is not None:
            fit._keeper.last(fit._signals.at)
    finally:
        fit._signals.stop_watchdog()
    text = f"asked to end by {fit._signals.name} at step {fit.state.step}"
    raise KeyboardInterrupt(text) if fit._signals.of_keyboard else Interrupted(text)
