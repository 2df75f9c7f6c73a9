"""The dialect's callbacks, called at trainkit's hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainkit.callbacks.base import Callback as Hook
from trainkit.errors import Interrupted, OutOfMemory
from trainkit.loop.recovery import is_out_of_memory

if TYPE_CHECKING:
    from trainkit.dialects.accmt.module import AcceleratorModule
    from trainkit.dialects.accmt.progress import Progress
    from trainkit.dialects.accmt.states import TrainingState
    from trainkit.dialects.accmt.trainer import Trainer
    from trainkit.loop.fit import Fit


class Callback:
    """Override the hooks you need. They run on every process; see `accmt.decorators` to run them on one."""

    trainer: Trainer | None = None

    def __init__(self, module: AcceleratorModule | None = None, state: TrainingState | None = None) -> None:
        self.module, self.state = module, state

    def on_fit_start(self) -> None:
        """Training starts."""

    def on_fit_end(self) -> None:
        """Training ended as it should, early or not."""

    def on_epoch_start(self) -> None:
        """An epoch starts, or goes on after a resume."""

    def on_epoch_end(self) -> None:
        """An epoch, its evaluation and its checkpoint are done."""

    def on_before_training_step(self, batch: Any) -> None:
        """Before `training_step`."""

    def on_after_training_step(self) -> None:
        """After `training_step`."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Before the backward pass; the loss is not divided yet."""

    def on_after_backward(self) -> None:
        """After the backward pass."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """After clipping, before the update."""

    def on_after_optimizer_step(self, optimizer: Any) -> None:
        """After the update."""

    def on_before_scheduler_step(self, scheduler: Any) -> None:
        """Before the schedule's step."""

    def on_after_scheduler_step(self, scheduler: Any) -> None:
        """After the schedule's step."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        """Gradients are still there."""

    def on_after_zero_grad(self, optimizer: Any) -> None:
        """Gradients are gone."""

    def on_evaluation_start(self) -> None:
        """Before a round of evaluation over all datasets."""

    def on_evaluation_end(self) -> None:
        """After it; metrics are in `state`."""

    def on_before_validation_step(self, batch: Any) -> None:
        """Before `validation_step`; `state.val_key` names the dataset."""

    def on_after_validation_step(self) -> None:
        """After `validation_step`."""

    def on_resume(self) -> None:
        """Everything is as it was when the checkpoint was written."""

    def on_save_checkpoint(self) -> None:
        """A checkpoint is durable."""

    def on_runtime_error(self, exception: BaseException) -> None:
        """A RuntimeError ended the run; raised again afterwards."""

    def on_cuda_out_of_memory(self, exception: BaseException) -> None:
        """A step did not fit into memory; raised again afterwards."""

    def on_keyboard_interrupt(self, exception: BaseException) -> None:
        """The run was asked to end; raised again afterwards."""

    def on_exception(self, exception: BaseException) -> None:
        """Another error ended the run; raised again afterwards."""


class Hooks(Hook):
    """Calls the dialect's callbacks, in the order of their list.

    Args:
        callbacks: whom.
        state: the run's.
        progress: the run's.
        manual: the module updates by itself, and says by `step_ends`, `schedule_starts` and `clearing_ends` what the
            loop does not know.
    """

    name = "accmt hooks"

    def __init__(
        self, callbacks: Sequence[Callback], state: TrainingState, progress: Progress, *, manual: bool
    ) -> None:
        self.callbacks, self._state, self._progress, self._manual = callbacks, state, progress, manual
        self._fit: Fit | None = None

    def _all(self, hook: str, *given: Any) -> None:
        self._call(hook, *given)
        # A callback may have written weights, and has no way to say so.
        if self._fit is not None and self._fit.strategy.updates_copies and self._is_overridden(hook):
            self._fit.strategy.weights_changed()

    def _call(self, hook: str, *given: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(*given)

    def _is_overridden(self, hook: str) -> bool:
        return any(getattr(type(callback), hook) is not getattr(Callback, hook) for callback in self.callbacks)

    def step_starts(self, batch: Any) -> None:
        """Before each attempt at a training step."""
        self._all("on_before_training_step", batch)

    def step_ends(self) -> None:
        """After a training step that updates by itself."""
        self._all("on_after_training_step")

    def schedule_starts(self) -> None:
        """Before the schedule's step."""
        assert self._fit is not None
        self._all("on_before_scheduler_step", self._fit.schedule)

    def clearing_ends(self) -> None:
        """After gradients are forgotten."""
        assert self._fit is not None
        self._all("on_after_zero_grad", self._fit.optimizer)

    def on_fit_start(self, fit: Fit) -> None:
        self._fit = fit
        self._all("on_fit_start")

    def on_resume(self, fit: Fit) -> None:
        self._all("on_resume")

    def on_epoch_start(self, fit: Fit) -> None:
        self._all("on_epoch_start")

    def on_forward_end(self, fit: Fit, loss: Tensor) -> None:
        if not self._manual:
            self.step_ends()
        self._all("on_before_backward", loss)

    def on_backward_end(self, fit: Fit) -> None:
        self._all("on_after_backward")

    def on_update_start(self, fit: Fit) -> None:
        self._all("on_before_optimizer_step", fit.optimizer)

    def on_optimizer_end(self, fit: Fit) -> None:
        self._all("on_after_optimizer_step", fit.optimizer)
        if self._per_update(fit) and not self._manual:
            self.schedule_starts()

    def on_schedule_end(self, fit: Fit) -> None:
        self._all("on_after_scheduler_step", fit.schedule)

    def on_clear_start(self, fit: Fit) -> None:
        self._all("on_before_zero_grad", fit.optimizer)

    def on_update_end(self, fit: Fit) -> None:
        if not self._manual:
            self.clearing_ends()

    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        if self._manual or fit.schedule is None or self._per_update(fit):
            return
        if self._state.is_last_training_batch:
            self.schedule_starts()

    def on_evaluation_start(self, fit: Fit) -> None:
        self._all("on_evaluation_start")

    def on_evaluation_step_start(self, fit: Fit, name: str, batch: Any) -> None:
        self._all("on_before_validation_step", batch)

    def on_evaluation_step_end(self, fit: Fit, name: str) -> None:
        self._all("on_after_validation_step")

    def on_evaluation_end(self, fit: Fit, results: Mapping[str, float]) -> None:
        self._all("on_evaluation_end")

    def on_checkpoint(self, fit: Fit, path: Path) -> None:
        self._all("on_save_checkpoint")

    def on_epoch_done(self, fit: Fit) -> None:
        self._all("on_epoch_end")

    def on_fit_end(self, fit: Fit) -> None:
        if self._progress.cut:
            self._all("on_epoch_end")
        self._all("on_fit_end")

    def on_error(self, fit: Fit, error: BaseException) -> None:
        self._fit = None  # nothing is trained any more
        self._all(_error_hook(error), error)

    def _per_update(self, fit: Fit) -> bool:
        return fit.schedule is not None and fit.trainer.schedule_per == "update"


def _error_hook(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt | Interrupted):
        return "on_keyboard_interrupt"
    if isinstance(error, OutOfMemory) or is_out_of_memory(error):
        return "on_cuda_out_of_memory"
    return "on_runtime_error" if isinstance(error, RuntimeError) else "on_exception"
