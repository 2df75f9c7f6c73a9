"""Buffers that training changes: what a module keeps out of its state, and what a failed step wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class Unstored:
    """The buffers of a module that were registered with `persistent=False`, which a resumed run needs too.

    Most are tables, which the constructor makes again. To store those costs room, so only what was written or replaced
    since the run made its module is stored.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = {name: (buffer, _version(buffer)) for name, buffer in self._named()}

    def changed(self) -> dict[str, Tensor]:
        """Those that an operation marked as written, or that were replaced since, by name. Writes through `.data`, and
        those of batch norm, are not marked."""
        return {name: buffer for name, buffer in self._named() if not self._is_as_before(name, buffer)}

    def put(self, buffers: Mapping[str, Tensor]) -> None:
        """Takes over what `changed` returned."""
        for name, value in buffers.items():
            path, _, key = name.rpartition(".")
            owner = self._module.get_submodule(path)
            present = owner._buffers.get(key)
            if present is not None and (present.shape, present.dtype) == (value.shape, value.dtype):
                present.copy_(value)
            else:
                place = next(self._module.parameters()).device if present is None else present.device
                owner._buffers[key] = value.to(place)
                owner._non_persistent_buffers_set.add(key)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for path, owner in self._module.named_modules():
            for key in owner._non_persistent_buffers_set:
                buffer = owner._buffers.get(key)
                if buffer is not None:
                    yield f"{path}.{key}" if path else key, buffer

    def _is_as_before(self, name: str, buffer: Tensor) -> bool:
        before, version = self._before.get(name, (None, 0))
        return before is buffer and version == _version(buffer)


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version


class Attempted:
    """The buffers of a module before an attempt at a step, which may write them and fail.

    Buffers that the first complete attempt left as they were are tables, and are not copied again until an operation
    marks them as written. Batch norm does not mark its statistics, so it has no tables.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: list[tuple[nn.Module, str, Tensor, Tensor | None]] = []
        self._tables: dict[int, tuple[Tensor, int]] | None = None

    def begin(self) -> None:
        """Copies them."""
        self._before = [
            (part, key, buffer, None if self._is_table(buffer) else buffer.clone())
            for part in self._module.modules()
            for key, buffer in part._buffers.items()
            if buffer is not None
        ]

    def succeed(self) -> None:
        """Keeps what the attempt wrote."""
        if self._tables is None:
            self._tables = {
                id(buffer): (buffer, _version(buffer))
                for part, key, buffer, copy in self._before
                if not isinstance(part, _NormBase) and part._buffers.get(key) is buffer
                if copy is not None and torch.equal(copy, buffer)
            }
        self._before = []

    @torch.no_grad()
    def undo(self) -> None:
        """Puts back what they were."""
        for part, key, buffer, copy in self._before:
            part._buffers[key] = buffer
            if copy is not None:
                buffer.copy_(copy)
        self._before = []

    def _is_table(self, buffer: Tensor) -> bool:
        table = (self._tables or {}).get(id(buffer))  # it refers to the tensor, so no other one gets its id
        return table is not None and table[1] == _version(buffer)
