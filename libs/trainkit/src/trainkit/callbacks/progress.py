"""A progress bar in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

from torch import Tensor

from trainkit.callbacks.base import Callback

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit


class Progress(Callback):
    """One bar over all steps of the run, from the first process: loss, evaluation results, speed, time left.

    Args:
        file: where it is drawn; default the standard error stream.
        interval_s: the least time between two drawings, in seconds.
    """

    def __init__(self, file: IO[str] | None = None, *, interval_s: float = 0.5) -> None:
        self._file, self._interval_s = file, interval_s
        self._bar: Any = None
        self._shown: float | None = None

    def on_epoch_start(self, fit: Fit) -> None:
        if self._bar is None and fit.strategy.is_main:
            from tqdm import tqdm

            self._bar = tqdm(
                total=fit.total_steps,
                initial=fit.state.step,
                desc=fit.trainer.name,
                unit="st",
                file=self._file or sys.stderr,
                mininterval=self._interval_s,
                dynamic_ncols=True,
            )

    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        if self._bar is None:
            return
        if fit.train_loss is not self._shown:
            self._shown = fit.train_loss
            self._bar.set_postfix(loss=f"{fit.train_loss:.4g}", refresh=False)
        self._bar.update(1)

    def on_evaluation_end(self, fit: Fit, results: Mapping[str, float]) -> None:
        if self._bar is not None:
            values = ", ".join(f"{name} {value:.4g}" for name, value in results.items())
            self._bar.write(f"step {fit.state.step}: {values}", file=self._file or sys.stderr)

    def on_fit_end(self, fit: Fit) -> None:
        self._close(fit.stop_reason)

    def on_error(self, fit: Fit, error: BaseException) -> None:
        self._close(f"{type(error).__name__}: {error}")

    def _close(self, reason: str | None) -> None:
        if self._bar is not None:
            if reason is not None:
                self._bar.write(f"stopped: {reason}", file=self._file or sys.stderr)
            self._bar.close()
            self._bar = None
