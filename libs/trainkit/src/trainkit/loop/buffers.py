"""Buffers that a module keeps out of its state, and that training changes: a resumed run needs them too.

Most are tables, which the constructor makes again. To store those costs room, so only what was written or replaced
since the run made its module is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn


class Unstored:
    """The buffers of a module that were registered with `persistent=False`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = {name: (buffer, _version(buffer)) for name, buffer in self._named()}

    def changed(self) -> dict[str, Tensor]:
        """Those that were written or replaced since, by name. What is written through `.data` is not noticed."""
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
