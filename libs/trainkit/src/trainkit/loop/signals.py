"""SIGTERM and Ctrl-C as wishes: the run ends at a place between two steps, on all processes at the same one."""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from trainkit.checkpoints.policy import Checkpoints
from trainkit.errors import Interrupted
from trainkit.loop.agreement import Agreement
from trainkit.loop.places import Place, after_step, in_evaluation

if TYPE_CHECKING:
    from trainkit.state import State
    from trainkit.strategies.base import Strategy

_SLACK_S = 5.0
_log = logging.getLogger("trainkit")


class Left(BaseException):
    """An evaluation was left, because the run ends here. Nobody else catches it."""


class Signals:
    """Notes SIGTERM and Ctrl-C while it is entered, when that is possible (the main thread).

    A second Ctrl-C does not wait. A program's own handler of Ctrl-C stays.

    Args:
        policy: of checkpoints. Its grace period is the longest that a process waits for the others to agree.

    Attributes:
        asked: the run is to end.
        name: of the signal.
        at: when it came, by `time.monotonic`.
        place: the last place that this process went past, or the one that it is at.
    """

    def __init__(self, strategy: Strategy, state: State, policy: Checkpoints | None) -> None:
        self.asked = False
        self.name = ""
        self.at = 0.0
        self.place: Place = after_step(-1)
        self._strategy, self._state = strategy, state
        self._grace_s = policy.grace_s if policy is not None else Checkpoints.grace_s
        self._before: dict[int, Any] = {}
        self._agreement: Agreement | None = None
        self._watchdog: threading.Timer | None = None

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._note)
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._note_key)
            if self._strategy.world_size > 1:
                self._agreement = Agreement(self._strategy, set(self._before), self._begin)
        return self

    def __exit__(self, *error: object) -> None:
        self.stop_watchdog()
        if self._agreement is not None:
            self._agreement.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def of_keyboard(self) -> bool:
        """Whether somebody pressed Ctrl-C."""
        return self.name == "SIGINT"

    def reached(self, place: Place) -> bool:
        """Whether the run ends at this place, at which every process asks once there was a signal. Waits for the
        others, when all got one.

        Raises:
            Interrupted: they did not agree within the grace period.
        """
        self.place = place
        if self._agreement is None or not self._agreement.begun:
            return self._strategy.world_size == 1
        end = self._agreement.wait(self.at + self._grace_s - time.monotonic())
        if end is None:
            self.stop_watchdog()
            raise Interrupted(
                f"asked to end at step {self._state.step}, and the processes did not agree on where within "
                f"grace_s={self._grace_s:g} seconds: the run goes on from its last checkpoint; give it more time"
            ) from self._agreement.problem
        return place > end

    def meet(self) -> None:
        """Waits, at the place where the run ends, for all processes.

        Raises:
            Interrupted: one did not come within the grace period, so no last checkpoint can be made.
        """
        if self._agreement is None:
            return
        problem: Exception | None = None
        try:
            missing = self._agreement.meet(self.at + self._grace_s)
        except RuntimeError as error:  # the store is gone with the process that kept it
            missing, problem = [0], error
        if missing:
            self.stop_watchdog()
            raise Interrupted(
                f"asked to end at step {self._state.step}, and rank {', '.join(map(str, missing))} did not come to "
                f"that step within grace_s={self._grace_s:g} seconds: no checkpoint was made, and the run resumes from "
                "the one before. Look at the output of that rank; give it more time if it is only slow"
            ) from problem

    def stop_watchdog(self) -> None:
        """Nothing that takes the other processes follows: the end is not forced any more."""
        if self._watchdog is not None:
            self._watchdog.cancel()

    def _start_watchdog(self) -> None:
        if math.isfinite(self._grace_s):
            delay_s = self.at + self._grace_s + _SLACK_S - time.monotonic()
            self._watchdog = threading.Timer(min(max(delay_s, 0.0), threading.TIMEOUT_MAX), self._end_process)
            self._watchdog.daemon = True
            self._watchdog.start()

    def _end_process(self) -> None:
        """Ends a process whose main thread waits for another one in a collective, which no exception can interrupt."""
        sys.stderr.write(
            f"trainkit.errors.Interrupted: asked to end, and still in step {self._state.step + 1} or its checkpoint "
            f"{_SLACK_S:g} seconds after grace_s={self._grace_s:g}: a process hangs, this one or one that it waits "
            "for. This process ends now without a checkpoint, and the run resumes from the one before. It was here:\n"
        )
        sys.stderr.flush()
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)

    def watch(self, late: bool) -> Callable[[int, int], None]:
        """What an evaluation asks between two batches, with the set's number and the batches done of it; it raises
        `Left` when the run ends there.

        Args:
            late: it is the evaluation after the last step.
        """
        step = self._state.step

        def look(at: int, batch: int) -> None:
            self.place = place = in_evaluation(step, at, batch, late)
            if self.asked and self.reached(place):
                raise Left

        return look

    def _begin(self) -> Place:
        """All processes got their signal: from here on this one waits at its next place. Returns the one before that,
        or a later one. Called by the agreement's thread, while the main thread goes on."""
        self.at = self.at or time.monotonic()
        self.asked = True
        self._start_watchdog()
        place, step = self.place, self._state.step
        return place if place[0] >= step else after_step(step)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.name:
            self.asked, self.name, self.at = True, signal.Signals(number).name, self.at or time.monotonic()

    def _note_key(self, number: int, frame: FrameType | None) -> None:
        if self.of_keyboard:
            raise KeyboardInterrupt
        self._note(number, frame)
        self.name = "SIGINT"  # also after SIGTERM, so that the next one does not wait
        _log.warning("ending between two steps, with a checkpoint if there are any; Ctrl-C again ends at once")
