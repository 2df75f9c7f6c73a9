"""Initial values of a submodule on the meta device, by torch's convention: its `reset_parameters` makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from trainkit.errors import InvalidSetup

_INSTEAD = "give the trainer what makes the module, module=Net or module=partial(Net, ...), instead of one on meta"


def refuse_without_reset(module: nn.Module, names: Sequence[str]) -> None:
    """Checks that every one of these tensors, which are on the meta device, can get values.

    Raises:
        InvalidSetup: the submodule that has it has no `reset_parameters`.
    """
    for name in names:
        path, _, own = name.rpartition(".")
        owner = module.get_submodule(path)
        if not callable(getattr(owner, "reset_parameters", None)):
            raise InvalidSetup(
                f"{name} is on the meta device, and {_called(owner, path)} has no reset_parameters() that would give "
                f"{own} its values: define one, or pass weights=, or {_INSTEAD}"
            )


def reset(owner: nn.Module, path: str) -> dict[str, Tensor]:
    """Values of a submodule's own tensors, on the host, by their full names. The submodule stays on the meta device.

    Raises:
        InvalidSetup: `reset_parameters` leaves one of them as it is, or writes tensors of other submodules.
    """
    before = [(held, dict(held)) for held in (owner._parameters, owner._buffers)]
    made: dict[str, Tensor] = {}
    try:
        for held, tensors in before:
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    made[name] = held[name] = _unset(tensor)  # type: ignore[assignment]
        with _Guard(_called(owner, path)):
            owner.reset_parameters()  # type: ignore[operator]
        made = {name: getattr(owner, name) for name in made}
    finally:
        for held, tensors in before:
            held.update(tensors)  # type: ignore[arg-type]
    for name, tensor in made.items():
        if _is_unset(tensor):
            raise InvalidSetup(
                f"reset_parameters() of {_called(owner, path)} does not give {name} its values, which is on the meta "
                f"device: write it there, or {_INSTEAD}"
            )
    return {f"{path}.{name}" if path else name: tensor.detach() for name, tensor in made.items()}


def _called(owner: nn.Module, path: str) -> str:
    return f"{path} ({type(owner).__name__})" if path else type(owner).__name__


def _mark(dtype: torch.dtype) -> Any:
    """A value that no initialisation gives."""
    if dtype is torch.bool:
        return None
    return torch.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def _unset(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="cpu")
    if (mark := _mark(tensor.dtype)) is not None:
        empty.fill_(mark)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _is_unset(tensor: Tensor) -> bool:
    mark = _mark(tensor.dtype)
    if mark is None:
        return False
    return bool(tensor.isnan().any() if mark is torch.nan else (tensor == mark).any())


class _Guard(TorchDispatchMode):
    """Refuses operations on the meta device, which would do nothing."""

    def __init__(self, called: str) -> None:
        super().__init__()
        self._called = called

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(each, Tensor) and each.is_meta for each in tree_flatten((args, kwargs))[0]):
            raise InvalidSetup(
                f"reset_parameters() of {self._called} also uses tensors of other submodules, and each is initialised "
                f"alone when it is on the meta device: {_INSTEAD}"
            )
        return func(*args, **(kwargs or {}))
