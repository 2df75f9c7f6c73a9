"""The base of callbacks. A hook that a class does not override is never called and costs nothing.

Every hook gets the running `Fit`: its `state` (counters), `module`, `optimizer`, `schedule`, `strategy`, `trainer`,
`results` (the last values of evaluations), and its verbs `log(values)`, `stop(reason)`, `evaluate()`, `checkpoint()`.
Hooks run on every process, in the order of the list; `fit.strategy.is_main` says whether this is the first process.
An exception in a hook is treated like one in training.

The order within one run:

    on_fit_start, on_resume (only when a checkpoint was read)
      on_epoch_start
        on_step_start, on_forward_end, on_backward_end, on_step_end      every batch
        on_update_start, on_optimizer_end, on_schedule_end,                  at the end of an accumulation window,
        on_clear_start, on_update_end                                        between on_backward_end and on_step_end
        on_evaluation_start, on_evaluation_step_start, on_evaluation_step_end,
        on_evaluation_end, or on_evaluation_left when a signal cut it short
      on_epoch_end                                                  after the epoch's evaluation, before its checkpoint
        on_checkpoint_start, on_checkpoint (when it is durable, at the end of a later step)
      on_epoch_done                                                 after the epoch's checkpoint, if one was due
    on_fit_end, or on_error
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from trainkit.loop.fit import Fit


class Callback:
    """Override the hooks you need.

    What has to survive a restart belongs in `state_dict`: nested mappings with text keys, of tensors (also sharded
    ones), numbers, text, truth values and lists. It is stored in every checkpoint under `name`.
    """

    @property
    def name(self) -> str:
        """The key of its state in a checkpoint; unique within a run. Default: the name of the class."""
        return type(self).__name__

    @property
    def settings(self) -> Mapping[str, Any]:
        """Plain settings, such as a decay: a resumed run reports those that differ from its checkpoint's."""
        return {}

    def state_dict(self) -> Mapping[str, Any]:
        """What a checkpoint stores; taken between two steps."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned; called after `on_fit_start` and before `on_resume`."""

    def on_fit_start(self, fit: Fit) -> None:
        """Module, optimizer and data are ready; nothing was read from a checkpoint yet."""

    def on_resume(self, fit: Fit) -> None:
        """Everything is as it was when the checkpoint was written."""

    def on_epoch_start(self, fit: Fit) -> None:
        """Also called when a resumed run goes on within an epoch."""

    def on_step_start(self, fit: Fit, batch: Any) -> None:
        """The batch is on the device."""

    def on_forward_end(self, fit: Fit, loss: Tensor) -> None:
        """`loss` is the step's mean loss on this process, with its gradient, before it is weighted."""

    def on_backward_end(self, fit: Fit) -> None:
        """The gradients of this batch are added to the window's."""

    def on_update_start(self, fit: Fit) -> None:
        """Gradients are complete: summed over processes, unscaled, clipped. `fit.grad_norm` is what it was."""

    def on_optimizer_end(self, fit: Fit) -> None:
        """The weights are new; gradients are still there. Not called when the update was left out."""

    def on_schedule_end(self, fit: Fit) -> None:
        """The schedule was stepped."""

    def on_clear_start(self, fit: Fit) -> None:
        """Gradients are about to be cleared, also when their update was left out."""

    def on_update_end(self, fit: Fit) -> None:
        """Gradients are gone; `state.update` counts this update."""

    def on_step_end(self, fit: Fit, loss: Tensor) -> None:
        """`state` counts this step. `loss` is detached: reading its number waits for the device."""

    def on_evaluation_start(self, fit: Fit) -> None:
        """Before a round over all evaluation sets."""

    def on_evaluation_step_start(self, fit: Fit, name: str, batch: Any) -> None:
        """`name` is the evaluation set's."""

    def on_evaluation_step_end(self, fit: Fit, name: str) -> None:
        """After one batch of an evaluation set."""

    def on_evaluation_end(self, fit: Fit, results: Mapping[str, float]) -> None:
        """`results` holds e.g. `val/loss`: numbers, the same on every process."""

    def on_evaluation_left(self, fit: Fit) -> None:
        """SIGTERM or Ctrl-C ended the run within an evaluation, which a resumed run does again from its start: undo
        what `on_evaluation_start` and what followed did to the state. The last checkpoint is made next."""

    def on_checkpoint_start(self, fit: Fit) -> None:
        """State is about to be copied."""

    def on_checkpoint(self, fit: Fit, path: Path) -> None:
        """The checkpoint at `path` is durable."""

    def on_epoch_end(self, fit: Fit) -> None:
        """`state.epoch` counts this epoch; its evaluation is done, its checkpoint comes next."""

    def on_epoch_done(self, fit: Fit) -> None:
        """The epoch's checkpoint was made, if one was due: nothing more comes of this epoch. A run that resumes from
        that checkpoint calls it before its first step."""

    def on_fit_end(self, fit: Fit) -> None:
        """The run ended as it should, early or not."""

    def on_error(self, fit: Fit, error: BaseException) -> None:
        """The run ends with `error`, which is raised again afterwards; KeyboardInterrupt and `Interrupted` too."""


HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def overriding(callbacks: Sequence[Callback], hook: str) -> tuple[Callable[..., None], ...]:
    """The bound methods of those callbacks that override `hook`, in order."""
    base = getattr(Callback, hook)
    return tuple(getattr(callback, hook) for callback in callbacks if getattr(type(callback), hook) is not base)
