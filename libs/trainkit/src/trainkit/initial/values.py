"""The values with which a module starts, computed or read for one submodule at a time.

A module may be given as a callable that makes it, or with tensors on the meta device. Its tensors get their values only
once its strategy has placed them. The order in which values are computed does not depend on the strategy, so every
strategy starts with the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.initial.deferred import Recording
from trainkit.initial.replacing import like
from trainkit.initial.reset import refuse_without_reset, reset
from trainkit.initial.traversal import children_first, named_tensors, own_tensors
from trainkit.initial.weights import Weights
from trainkit.random import seeded
from trainkit.sharded import is_sharded, put


class Initial:
    """The initial values of a module that is not sharded yet.

    Args:
        module: some of its tensors may be on the meta device.
        seed: of random values.
        recording: how deferred tensors are made.
        weights: read instead of computed.

    Raises:
        InvalidSetup: a tensor on the meta device cannot get values, or `weights` do not fit the module.
    """

    def __init__(
        self, module: nn.Module, *, seed: int = 0, recording: Recording | None = None, weights: Weights | None = None
    ) -> None:
        self._seed, self._recording = seed, recording
        tensors = named_tensors(module)
        self._tensors = {name: tensor for name, tensor in tensors.items() if tensor.is_meta}
        self._tied = {name: id(tensor) for name, tensor in tensors.items()}  # others are not kept: sharding frees them
        self._weights = weights.open(module) if weights is not None else None
        self._done: set[int] = set()
        lost = [name for name in self._tensors if self._is_lost(name)]
        read = self._weights.names if self._weights is not None else ()
        refuse_without_reset(module, [name for name in lost if name not in read])
        self._twin = copy.deepcopy(module) if lost else None  # on the meta device, so it takes no memory

    @property
    def needed(self) -> bool:
        """Whether any tensor still has to get its values."""
        return self._weights is not None or bool(self._tensors)

    @torch.no_grad()
    def fill(self, module: nn.Module, device: torch.device, then: Callable[[nn.Module], None] | None = None) -> None:
        """Gives the module's tensors their values. Those on the meta device become tensors on `device`.

        Args:
            module: the same module, perhaps sharded; a sharded tensor has its memory already.
            device: where new tensors are.
            then: called for every submodule that has tensors of its own, directly after these have their values.
        """
        allocated: dict[int, Tensor] = {}
        with seeded(self._seed):
            for path, owner in children_first(module):
                if not own_tensors(owner):
                    continue
                _allocate(owner, device, allocated)
                self._fill(path, own_tensors(owner))
                if then is not None:
                    then(owner)

    def _fill(self, path: str, targets: dict[str, Tensor]) -> None:
        """Fills a submodule's own tensors, but for tied ones that an earlier submodule had."""
        full = {f"{path}.{name}" if path else name: target for name, target in targets.items()}
        full = {name: target for name, target in full.items() if self._tied[name] not in self._done}
        self._done.update(self._tied[name] for name in full)
        if self._weights is not None:
            self._weights.read({name: target for name, target in full.items() if name in self._weights.names})
            full = {name: target for name, target in full.items() if name not in self._weights.names}
        recorded = [name for name in full if self._is_recorded(name)]
        if recorded:
            assert self._recording is not None
            values = self._recording.values([self._tensors[name] for name in recorded])
            for name, value in zip(recorded, values, strict=True):
                put(full[name], value)
        if any(self._is_lost(name) for name in full):
            assert self._twin is not None
            for name, value in reset(self._twin.get_submodule(path), path).items():
                if name in full:
                    put(full[name], value)

    def _is_recorded(self, name: str) -> bool:
        tensor = self._tensors.get(name)
        return tensor is not None and self._recording is not None and self._recording.has(tensor)

    def _is_lost(self, name: str) -> bool:
        return name in self._tensors and not self._is_recorded(name)


def make(
    given: nn.Module | Callable[[], nn.Module], seed: int, weights: Weights | None, *, sharded: bool
) -> tuple[nn.Module, Initial | None]:
    """The module of a run, and its initial values if it does not have them.

    Args:
        given: the module, or what makes it.
        seed: generators of the host start from it while the module is made.
        weights: what the module starts with.
        sharded: a module that is made here gets no memory for its large tensors.

    Raises:
        InvalidSetup: a tensor on the meta device cannot get values, or `weights` do not fit.
    """
    recording = None
    module: Any  # what makes it may return anything
    if isinstance(given, nn.Module):
        module = given
    elif sharded:
        recording = Recording(random=weights is None or bool(weights.missing))
        with seeded(seed), recording:
            module = given()
        if isinstance(module, nn.Module):
            recording.finish(module)
    else:
        with seeded(seed):
            module = given()
    if not isinstance(module, nn.Module):
        return module, None
    initial = Initial(module, seed=seed, recording=recording, weights=weights)
    return module, initial if initial.needed else None


def _allocate(owner: nn.Module, device: torch.device, allocated: dict[int, Tensor]) -> None:
    """Gives a submodule's own tensors memory in place of the meta device. Tied ones stay tied."""
    for held in (owner._parameters, owner._buffers):
        for name, tensor in held.items():
            if tensor is None or not tensor.is_meta or is_sharded(tensor):
                continue
            if id(tensor) not in allocated:
                allocated[id(tensor)] = like(tensor, torch.empty_like(tensor, device=device))
            held[name] = allocated[id(tensor)]  # type: ignore[assignment]
