"""Modules that go backward and update by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainkit.dialects.accmt.module import AcceleratorModule, Engine
from trainkit.errors import InvalidSetup
from trainkit.module import ManualModule

if TYPE_CHECKING:
    from trainkit.dialects.accmt.callbacks import Hooks
    from trainkit.dialects.accmt.states import TrainingState
    from trainkit.loop.manual import Updates


class ExtendedAcceleratorModule(AcceleratorModule):
    """`training_step` calls `backward`, `step` and `zero_grad`; the loss that it returns is only logged."""

    engine: ManualEngine | None = None

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Adds the gradients of `loss`; keywords are those of torch's `backward`, such as `retain_graph`."""
        self._updates.backward(loss, **kwargs)

    def step(self) -> None:
        """`step_optimizer`, then `step_scheduler`."""
        self.step_optimizer()
        self.step_scheduler()

    def step_optimizer(self) -> None:
        """Clips as the trainer says, and updates the weights."""
        self._updates.step_optimizer()

    def step_scheduler(self) -> None:
        """Steps the schedule, if there is one."""
        updates, engine = self._updates, self.engine
        if engine is not None and updates.has_schedule:
            engine.hooks.schedule_starts()
            updates.step_schedule()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients. Nothing else does it."""
        updates, engine = self._updates, self.engine
        assert engine is not None
        updates.zero_grad(set_to_none)
        engine.hooks.clearing_ends()

    @property
    def _updates(self) -> Updates:
        if self.engine is None:
            raise InvalidSetup(f"{type(self).__name__} can only step while a trainer fits it")
        return self.engine.updates


class ManualEngine(Engine, ManualModule):
    """Holds the model of a module that updates by itself."""

    def __init__(
        self,
        owner: ExtendedAcceleratorModule,
        state: TrainingState,
        metrics: Mapping[str, set[str]],
        hooks: Hooks,
    ) -> None:
        super().__init__(owner, state, metrics, hooks)
        owner.engine = self

    def training_step(self, batch: Any) -> Tensor:
        self.hooks.step_starts(batch)
        loss = self._owner.training_step(batch)
        if not isinstance(loss, Tensor) or loss.ndim:
            raise TypeError(f"training_step has to return a scalar tensor, not {loss!r}")
        self.hooks.step_ends()
        return loss.detach()


def engine(owner: AcceleratorModule, state: TrainingState, metrics: Mapping[str, set[str]], hooks: Hooks) -> Engine:
    """What the loop trains in the module's place."""
    if isinstance(owner, ExtendedAcceleratorModule):
        return ManualEngine(owner, state, metrics, hooks)
    return Engine(owner, state, metrics, hooks)
