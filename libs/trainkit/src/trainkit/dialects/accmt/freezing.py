"""`AcceleratorModule.freeze` and `unfreeze` during a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from trainkit.callbacks.base import Callback as Hook
from trainkit.loop.frozen import train_also, train_no_more

if TYPE_CHECKING:
    from trainkit.dialects.accmt.module import AcceleratorModule
    from trainkit.loop.fit import Fit


class Freezing(Hook):
    """Applies what a module freezes and unfreezes during its run, and stores it with checkpoints.

    Within an accumulation window a change waits for the next one: a window's gradients are those of the parameters that
    were trained at its start.

    Args:
        module: the user's.
    """

    name = "accmt freezing"

    def __init__(self, module: AcceleratorModule) -> None:
        self._module = module
        self._fit: Fit | None = None
        self._within = False
        self._waiting: list[tuple[bool, list[str]]] = []
        self._unfrozen: list[str] = []
        self._frozen: list[str] = []

    def state_dict(self) -> Mapping[str, Any]:
        changed = self._unfrozen or self._frozen
        return {"unfrozen": list(self._unfrozen), "frozen": list(self._frozen)} if changed else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert self._fit is not None
        self._apply(self._fit, [(True, state["unfrozen"]), (False, state["frozen"])])

    def on_fit_start(self, fit: Fit) -> None:
        self._fit, self._module.freezing = fit, self

    def on_step_start(self, fit: Fit, batch: Any) -> None:
        if self._waiting and not fit.state.window:
            self._waiting, waiting = [], self._waiting
            self._apply(fit, waiting)
        self._within = True

    def on_step_end(self, fit: Fit, loss: Any) -> None:
        self._within = False

    def on_fit_end(self, fit: Fit) -> None:
        self._module.freezing = None

    def on_error(self, fit: Fit, error: BaseException) -> None:
        self._module.freezing = None

    def change(self, part: nn.Module, trained: bool) -> None:
        """Trains the parameters of a part of the model, or freezes them."""
        fit = self._fit
        assert fit is not None
        wanted = {id(p) for p in part.parameters()}
        names = {id(p): name for name, p in fit.module.named_parameters() if id(p) in wanted}
        for p in part.parameters():
            if id(p) not in names:
                p.requires_grad_(trained)
        if self._within or fit.state.window:
            self._waiting.append((trained, list(names.values())))
        else:
            self._apply(fit, [(trained, list(names.values()))])

    def _apply(self, fit: Fit, changes: list[tuple[bool, list[str]]]) -> None:
        for trained, names in changes:
            if trained:
                train_also(fit, names)
                self._unfrozen += [name for name in names if name not in self._unfrozen]
                self._frozen = [name for name in self._frozen if name not in names]
            else:
                train_no_more(fit, names)
                self._frozen += [name for name in names if name not in self._frozen]
