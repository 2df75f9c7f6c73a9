"""What a run is about to do, and why it ended early, in one line each."""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING

from trainkit.callbacks.base import Callback
from trainkit.data.loader import Loader

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit


class Summary(Callback):
    """Writes a line when a run starts, from the first process: processes, samples per update, length, optimizer.

    It writes another one when the run was stopped early, or had nothing left to train.

    Args:
        file: where; default the standard error stream.
    """

    def __init__(self, file: IO[str] | None = None) -> None:
        self._file = file

    def on_fit_start(self, fit: Fit) -> None:
        if fit.strategy.is_main:
            self._write(fit, "; ".join(_parts(fit)))

    def on_fit_end(self, fit: Fit) -> None:
        if not fit.strategy.is_main:
            return
        if fit.stop_reason is not None:
            self._write(fit, f"stopped at step {fit.state.step}: {fit.stop_reason}")
        elif fit.resumed_step == fit.state.step:
            self._write(fit, f"nothing to train: the run reached {fit.max_duration} at step {fit.state.step}")

    def _write(self, fit: Fit, text: str) -> None:
        print(f"{fit.trainer.name}: {text}", file=self._file or sys.stderr)


def _parts(fit: Fit) -> list[str]:
    trainer, world = fit.trainer, fit.strategy.world_size
    group = fit.optimizer.param_groups[0]
    return [
        f"{world} process{'es' * (world > 1)} ({fit.strategy.name}, {fit.strategy.device}, {trainer.precision})",
        *_samples(fit),
        f"{trainer.max_duration}, {fit.feed.steps(0) or '?'} steps per epoch",
        f"{type(fit.optimizer).__name__} from lr {group['lr']}",
        f"{type(fit.schedule).__name__} per {trainer.schedule_per}" if fit.schedule is not None else "no schedule",
        f"gradients clipped at {trainer.clip_norm}" if trainer.clip_norm is not None else "gradients not clipped",
    ]


def _samples(fit: Fit) -> list[str]:
    if not isinstance(fit.feed, Loader):
        return []
    world, accumulate = fit.strategy.world_size, fit.trainer.accumulate
    total = fit.feed.batch_size * accumulate
    return [f"{fit.feed.batch_size // world} samples x {world} x {accumulate} accumulated = {total} per update"]
