"""The checkpoints of a run: opened, made when they are due, completed at the end."""

from __future__ import annotations

import math
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.checkpoints.policy import Checkpoints
from trainkit.checkpoints.saver import Saver
from trainkit.checkpoints.shards import refuse_other_types
from trainkit.errors import Interrupted
from trainkit.initial.traversal import named_tensors
from trainkit.loop import snapshots

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit


class Keeper:
    """Makes the checkpoints of one run.

    Attributes:
        asked: a checkpoint is to be made at the end of this window.
        saved_at: the step of the last one, or -1.
    """

    def __init__(self, fit: Fit, policy: Checkpoints, closing: ExitStack) -> None:
        self._fit, self._policy = fit, policy
        refuse_other_types(named_tensors(fit.module))
        self._folder = policy.place()
        self._saver = Saver(
            self._folder,
            policy,
            rank=fit.strategy.rank,
            world_size=fit.strategy.world_size,
            before_commit=fit.flush_trackers,
        )
        closing.callback(self._close)
        self.asked = False
        self.saved_at = -1

    @property
    def busy(self) -> bool:
        """Whether there is something to look at after the next step, whatever is due then."""
        return self.asked or self._saver.busy

    def resume(self) -> bool:
        """Puts the run where its newest checkpoint was taken. Returns whether there is one."""
        source = snapshots.source(self._fit.strategy, self._policy, self._folder)
        if source is None:
            return False
        if snapshots.load(self._fit, source):
            self.saved_at = self._fit.state.step
        return True

    def look(self, over: bool) -> None:
        """Makes a checkpoint when one was asked for, and tells of one that became durable."""
        if self.asked and not self._fit.state.window and not (over and self._policy.at_end):
            self.save()
        self._tell(self._saver.finished())

    def save(self) -> None:
        """Makes a checkpoint now; waits for the one before, and tells of that."""
        fit = self._fit
        self.asked = False
        self._tell(self._saver.wait())
        self.saved_at = fit.state.step
        fit.refuse_non_finite()
        fit.call("on_checkpoint_start")
        fit.state.checkpoints += 1
        self._saver.save(snapshots.take(fit))

    def _save_last(self) -> None:
        """Makes the checkpoint that an uninterrupted run does not make: it must change nothing for what comes after."""
        fit = self._fit
        self.saved_at = fit.state.step
        fit.refuse_non_finite()
        fit.call("on_checkpoint_start")
        self._saver.save(snapshots.take(fit, interrupted=True))

    def finish(self) -> None:
        """Completes what is in the making; before that, makes the one at the end that the policy wants."""
        if self._policy.at_end and self.saved_at != self._fit.state.step:
            self.save()
        self._tell(self._saver.wait())

    def last(self, asked_at: float) -> None:
        """Makes the last checkpoint of a run that was asked to end at this time (of `time.monotonic`).

        Raises:
            Interrupted: it was not durable within the grace period. What was begun is given up.
        """
        deadline = asked_at + self._policy.grace_s
        if self.saved_at != self._fit.state.step:
            self._complete(deadline)
            self._save_last()
        self._complete(deadline)

    def _close(self) -> None:
        """Completes what is in the making; when the run was asked to end, within the grace period: a process that does
        not come along could keep it for long."""
        signals = self._fit._signals
        self._saver.close(_left(signals.at + self._policy.grace_s) if signals.asked else None)

    def _complete(self, deadline: float) -> None:
        try:
            path = self._saver.wait(timeout_s=_left(deadline))
        except TimeoutError:
            self._saver.abandon()
            raise Interrupted(
                f"asked to end at step {self._fit.state.step}, and its checkpoint was not durable within "
                f"grace_s={self._policy.grace_s:g} seconds: the run goes on from the one before; give it more time, or "
                "make checkpoints more often"
            ) from None
        self._tell(path)

    def _tell(self, durable: Path | None) -> None:
        if durable is not None:
            self._fit.tell_checkpoint(durable)


def _left(deadline: float) -> float | None:
    """Seconds until then, by `time.monotonic`; None when it never comes."""
    return min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX) if math.isfinite(deadline) else None
