"""Steps that go backward and update by themselves: `ManualModule.updates`.

Gradients stay on their process until `step_optimizer`, which averages them over all processes: a step may go backward
as often as it likes, and nothing of a wrapper's is in its way.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainkit.durations import duration
from trainkit.errors import InvalidSetup
from trainkit.loop.losses import loss_of
from trainkit.module import Loss, ManualModule

if TYPE_CHECKING:
    from trainkit.loop.fit import Fit
    from trainkit.trainer import Trainer

_log = logging.getLogger("trainkit")


class Updates:
    """What a `ManualModule` steps with."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self._uncleared = self._told = False

    @property
    def has_schedule(self) -> bool:
        """Whether there is a schedule to step."""
        return self._fit.schedule is not None and self._fit.plan.per != "evaluation"

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Adds the gradients of `loss`.

        Args:
            loss: the mean over this process's part of the batch.
            options: of torch's `backward`, such as `retain_graph=True`.
        """
        fit = self._fit
        for hook in fit._hooks.on_forward_end:
            hook(fit, loss)
        weight = fit.window.weight
        fit.strategy.backward(loss if weight == 1.0 else loss * weight, **options)
        for hook in fit._hooks.on_backward_end:
            hook(fit)

    def step(self) -> None:
        """Steps the optimizer, then the schedule, if there is one."""
        self.step_optimizer()
        self.step_schedule()

    def step_optimizer(self) -> None:
        """Averages the gradients over all processes, clips them as the trainer says, and updates the weights."""
        fit = self._fit
        if self._uncleared and not self._told:
            self._told = True
            _log.warning("a second update without zero_grad in between: its gradients are added to the first one's")
        fit.strategy.synchronise()
        fit.apply()
        fit.state.update += 1
        self._uncleared = True
        for hook in fit._hooks.on_update_end:
            hook(fit)

    def step_schedule(self) -> None:
        """Steps the schedule, if there is one. `ReduceLROnPlateau` steps after evaluations instead."""
        if self.has_schedule:
            self._fit.step_schedule()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients; False: makes them zeros. Nobody else does it."""
        self._uncleared = False
        self._fit.call("on_clear_start")
        self._fit.strategy.clear(self._fit.optimizer, set_to_none)


def open_updates(fit: Fit) -> bool:
    """Gives a `ManualModule` what it steps with. Returns whether the module is one.

    Raises:
        InvalidSetup: something else would step or repeat in its place.
    """
    trainer, module = fit.trainer, fit.module
    if not isinstance(module, ManualModule):
        return False
    name = type(module).__name__
    if trainer.accumulate != 1 or trainer.out_of_memory != "raise" or trainer.precision == "fp16":
        raise InvalidSetup(
            f"{name} updates by itself: leave accumulate at 1 and out_of_memory at 'raise', and choose fp32 or bf16"
        )
    if (setting := _in_tokens(trainer)) is not None:
        raise InvalidSetup(
            f"{name} updates by itself, and nobody counts its tokens: give {setting} in steps, updates, samples or "
            "epochs"
        )
    if not fit.strategy.works_alone:
        raise InvalidSetup(f"{name} updates by itself, which strategy={fit.strategy.name!r} cannot do: use 'ddp'")
    module.updates = Updates(fit)
    fit._forward = fit.strategy.alone
    return True


def _in_tokens(trainer: Trainer) -> str | None:
    """The first setting that is counted in tokens."""
    settings = ("max_duration", "log_every", "evaluate_every", "check_sync_every")
    lengths = {name: getattr(trainer, name) for name in settings}
    lengths["Checkpoints(every=...)"] = trainer.checkpoints.every if trainer.checkpoints is not None else None
    return next((name for name, each in lengths.items() if each is not None and duration(each).unit == "tok"), None)


def step(fit: Fit, batch: Any) -> Tensor:
    """The module's whole step; its loss is only logged."""
    fit.output = output = fit._forward(batch)
    loss = loss_of(output, "training_step")
    if fit._adds:
        fit.loss.add(loss, fit.window.rows)
    return loss.mean if isinstance(loss, Loss) else loss
