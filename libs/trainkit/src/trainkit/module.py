"""What the loop asks of a user's module: any `torch.nn.Module` with a `training_step`.

    class Digits(nn.Module):
        def training_step(self, batch):            # a mean loss over the batch ...
            images, labels = batch
            return F.cross_entropy(self(images), labels)

        def evaluation_step(self, batch):          # optional: what metrics are computed from
            images, labels = batch
            logits = self(images)
            return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits, labels)}

A step that returns `Loss(sum, count)` is divided by the count of the whole update, over all processes and all
accumulated steps, which is exact when batches hold different numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from torch import Tensor, nn

if TYPE_CHECKING:
    from trainkit.loop.manual import Updates


class Loss(NamedTuple):
    """A loss as a sum and what to divide it by.

    Args:
        sum: scalar, the sum of losses over what is counted; carries the gradient.
        count: how much was counted (tokens, pixels, samples), a number or a scalar tensor. May be zero on one process.
    """

    sum: Tensor
    count: Tensor | int | float  # type: ignore[assignment]

    @property
    def mean(self) -> Tensor:
        """The mean over what is counted; 0 when that is nothing."""
        none = self.count == 0
        return self.sum / (self.count + none)


StepOutput: TypeAlias = "Tensor | Loss | Mapping[str, Any]"
"""A mean loss, a `Loss`, or a mapping with one of them under `"loss"`; the rest of it is `Fit.output`."""


@runtime_checkable
class TrainingModule(Protocol):
    """The contract. `evaluation_step` is optional: without it, `training_step` gives the loss of an evaluation."""

    def training_step(self, batch: Any) -> StepOutput:
        """The loss of one batch."""
        ...


class ManualModule(nn.Module):
    """The base of modules whose `training_step` goes backward and updates by itself, as often as it likes.

        def training_step(self, batch):
            loss = self.loss_of(batch)
            self.updates.backward(loss)
            self.updates.step()
            self.updates.zero_grad()
            return loss                     # only logged

    Attributes:
        updates: `backward`, `step`, `step_optimizer`, `step_schedule`, `zero_grad`; there while a trainer runs.
    """

    updates: Updates
