"""Keeps `TrainingState`, and sends the monitor's series."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit.callbacks.base import Callback as Hook
from trainkit.dialects.accmt.module import AcceleratorModule
from trainkit.dialects.accmt.monitor import Monitor
from trainkit.dialects.accmt.series import Series
from trainkit.dialects.accmt.states import TrainingState
from trainkit.errors import InvalidSetup
from trainkit.loop.losses import Mean
from trainkit.memory import resident_bytes
from trainkit.trackers.values import copied_value

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit


class Progress(Hook):
    """The first of a run's callbacks, so that the others find the state as it is.

    Args:
        module: the user's; its teacher is put in place.
        state: what is kept.
        series: the run's trackers.
        monitor: the switches.
        log_steps: the trainer's `log_every` in steps; 0: at the end of each epoch; None: never.
        max_steps: where the run ends, also within an epoch; None: it ends with an epoch.

    Attributes:
        cut: the run ended within an epoch, which counts as the end of that epoch.
    """

    name = "accmt progress"

    def __init__(
        self,
        module: AcceleratorModule,
        state: TrainingState,
        series: Series,
        monitor: Monitor,
        log_steps: int | None,
        max_steps: int | None = None,
    ) -> None:
        self._module, self._state, self._series, self._monitor = module, state, series, monitor
        self._log_steps, self._due, self._max_steps, self.cut = log_steps, False, max_steps, False
        self._epoch_loss = Mean(torch.device("cpu"))
        self._fit: Fit | None = None
        self._skipped = 0
        self._within = False
        self._asked: dict[tuple[str, int, str], Any] = {}

    def state_dict(self) -> Mapping[str, Any]:
        assert self._fit is not None
        total, weight = self._epoch_loss.over(self._fit.strategy)
        return {"state": self._state.to_json(), "loss": total, "rows": weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert self._fit is not None
        self._state.load_json(state["state"])
        share = [state["loss"], state["rows"]] if self._fit.strategy.is_main else [0.0, 0.0]
        self._epoch_loss.load(torch.tensor(share, dtype=torch.float64))
        self._skipped = self._fit.state.skipped

    def on_fit_start(self, fit: Fit) -> None:
        module, self._fit = self._module, fit
        module.progress, module.device = self, fit.strategy.device
        module.optimizer, module.scheduler = fit.optimizer, fit.schedule
        fit.need_grad_norm = fit.need_grad_norm or self._monitor.grad_norm
        self._epoch_loss = Mean(fit.strategy.device)
        if self._monitor.gpu_utilization and fit.strategy.device.type != "cuda":
            warnings.warn("Monitor(gpu_utilization=True): there is no GPU, and no such series", stacklevel=2)
        if self._module.teacher is not None:
            self._module.teacher.to(fit.strategy.device).eval().requires_grad_(False)

    def on_epoch_start(self, fit: Fit) -> None:
        state = self._state
        state.epoch, state.is_end_of_epoch = fit.state.epoch, False
        state.is_last_epoch = state.epoch + 1 >= fit.totals().epochs

    def on_step_start(self, fit: Fit, batch: Any) -> None:
        state, position = self._state, fit.state.position
        state.train_step = position
        steps = fit.feed.steps(state.epoch)
        ends_epoch = steps is not None and position + 1 >= steps
        self.cut = not ends_epoch and fit.state.step + 1 == self._max_steps
        state.is_last_training_batch = ends_epoch or self.cut
        self._due, self._within = self._is_due(fit.state.step + 1), True

    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        self._give_out()
        state = self._state
        state.global_step, state.is_end_of_epoch = fit.state.step, state.is_last_training_batch
        self._epoch_loss.add(loss, fit.window.rows)
        if fit.state.skipped != self._skipped:
            self._skipped = fit.state.skipped
            fit.log({"skipped_updates": self._skipped})
        if self._due:
            fit.log(self._present(fit))
        if self.cut:
            self._end_epoch(fit)
            if self._log_steps == 0:  # here, because a row of later would not be in the checkpoint
                fit.log({"train/loss": self.train_loss})

    def on_evaluation_start(self, fit: Fit) -> None:
        self._state.val_key = ""

    def on_evaluation_step_start(self, fit: Fit, name: str, batch: Any) -> None:
        state = self._state
        state.val_step = 0 if state.val_key != name else state.val_step + 1
        state.val_key = name
        steps = fit.evaluated[name].steps(0)
        state.is_last_validation_batch = steps is not None and state.val_step + 1 >= steps
        self._within = True

    def on_evaluation_step_end(self, fit: Fit, name: str) -> None:
        self._give_out()

    def on_evaluation_end(self, fit: Fit, results: Mapping[str, float]) -> None:
        state = self._state
        state.evaluations_done = fit.state.evaluations
        for name in fit.evaluated:
            values = {old.removeprefix(f"{name}/"): each for old, each in results.items() if old.startswith(f"{name}/")}
            loss = values.pop("loss")
            metrics = {old.partition("/")[2]: each for old, each in values.items()}
            state.additional_metrics[name] = {"valid_loss": loss, **metrics}
            if len(fit.evaluated) == 1:
                state.best_valid_loss = min(state.best_valid_loss, loss)

    def on_epoch_end(self, fit: Fit) -> None:
        self._end_epoch(fit)
        self._epoch_loss.clear()

    def _end_epoch(self, fit: Fit) -> None:
        total, weight = self._epoch_loss.over(fit.strategy)
        self.train_loss = total / weight
        self._state.best_train_loss = min(self._state.best_train_loss, self.train_loss)

    def on_checkpoint_start(self, fit: Fit) -> None:
        if fit.interrupted:
            return
        self._state.num_checkpoints_made += 1
        if self._monitor.checkpoint:  # a row that is logged later would not be in the checkpoint
            fit.log({"checkpoint": self._state.num_checkpoints_made})

    def on_fit_end(self, fit: Fit) -> None:
        self._state.finished = True

    def log(self, values: Mapping[str, Any], step: int, reduction: str, *, always: bool = False) -> None:
        """`AcceleratorModule.log`; `always` is its `log_`. Within a step it waits for the end of the step: one process
        may try the step again, and its values must not meet those of the others twice."""
        if reduction not in ("mean", "sum"):
            raise InvalidSetup(f"reduction is 'mean' or 'sum', not {reduction!r}")
        if not self._due and not always:
            return
        self._asked.update({(name, step, reduction): _scalar(name, value) for name, value in values.items()})
        if not self._within:
            self._give_out()

    def _give_out(self) -> None:
        rows: dict[int, dict[str, Any]] = {}
        for (name, step, reduction), value in self._asked.items():
            rows.setdefault(step, {})[name] = self._reduced(value, reduction)
        self._within, self._asked = False, {}
        for step, values in rows.items():
            self._series.log(values, step)

    def _reduced(self, value: Any, reduction: str) -> Any:
        assert self._fit is not None
        if not isinstance(value, Tensor):
            return value
        total = self._fit.strategy.sum(value)
        return total / self._fit.strategy.world_size if reduction == "mean" else total

    def _is_due(self, step: int) -> bool:
        if self._log_steps == 0:
            return self._state.is_last_training_batch
        return self._log_steps is not None and step % self._log_steps == 0

    def _present(self, fit: Fit) -> dict[str, float | Tensor]:
        monitor, values = self._monitor, dict[str, float | Tensor]()
        if monitor.epoch:
            values["epoch"] = self._state.epoch
        if monitor.learning_rate:
            rates = [group["lr"] for group in fit.optimizer.param_groups]
            names = ["learning_rate"] if len(rates) == 1 else [f"learning_rate_{at}" for at in range(len(rates))]
            values |= dict(zip(names, rates, strict=True))
        if monitor.grad_norm and fit.grad_norm is not None:
            values["grad_norm"] = fit.grad_norm
        return values | self._held(fit)

    def _held(self, fit: Fit) -> dict[str, float | Tensor]:
        """Memory in gigabytes of 10^9 bytes, under the names that the dialect gives it."""
        values = dict[str, float | Tensor]()
        if self._monitor.cpu_utilization:
            values["cpu_utilization"] = resident_bytes() / 1e9
        if self._monitor.gpu_utilization and fit.strategy.device.type == "cuda":
            values["gpu_utilization"] = torch.cuda.memory_allocated(fit.strategy.device) / 1e9
        return values


def _scalar(name: str, value: Any) -> Any:
    """What can be added over processes, with nobody else's hands on it."""
    if not isinstance(value, Tensor):
        return copied_value(value)
    if value.numel() != 1:
        raise InvalidSetup(f"log takes scalars; {name!r} has shape {tuple(value.shape)}")
    return value.detach().float().clone()
