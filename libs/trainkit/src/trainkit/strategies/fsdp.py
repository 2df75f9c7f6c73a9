"""Fully sharded: every process keeps a part of each parameter, its gradient and its optimizer state (torch's FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainkit.errors import InvalidSetup
from trainkit.precision import Precision
from trainkit.sharded import is_sharded, whole
from trainkit.strategies.base import TrainingStep
from trainkit.strategies.ddp import Distributed


class FSDP(Distributed):
    """torch's `fully_shard` on every unit and on the whole.

    Args:
        units: classes of submodules that are gathered one at a time, usually the model's block. Default: the elements
            of every `ModuleList` and `Sequential` that have parameters.
        reshard_after_forward: give gathered parameters up between the forward and the backward pass. Default: torch's.
        offload: keep shards on the host.
        gather_in_full: with `bf16` and `fp16`, gather weights in 32 bits also where the computation casts them anyway
            (linear layers and convolutions). For modules that leave autocast with such a layer.
    """

    name: ClassVar[str] = "fsdp"
    works_alone = False
    shards_parameters = True

    def __init__(
        self,
        *,
        units: Sequence[type[nn.Module]] = (),
        reshard_after_forward: bool | None = None,
        offload: bool = False,
        gather_in_full: bool = False,
    ) -> None:
        self._units, self._reshard, self._offload = tuple(units), reshard_after_forward, offload
        self._gather_in_full = gather_in_full

    def prepare(self, module: nn.Module, precision: Precision) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        self.precision = precision
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        self.barrier()  # a process that refuses the module must not end while the others still connect
        options: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": self._reshard,
            "offload_policy": CPUOffloadPolicy() if self._offload else OffloadPolicy(),
        }
        if precision.autocasts and not self._gather_in_full:
            cast_anyway = _cast_by_autocast(module)
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=precision.dtype,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,  # batches keep their format, as on one process
                param_dtype_override_fn=lambda p: precision.dtype if id(p) in cast_anyway else p.dtype,
            )
        for unit in self._found(module):
            _check_parameters(unit)
            fully_shard(unit, **options)
        _check_parameters(module)
        step = TrainingStep(module, precision)
        self._root = cast(Any, fully_shard(step, **options))
        self._fill(module)
        self.module, self.forward = module, self._root
        self.evaluate = partial(self._root, evaluate=True)

    def _fill(self, module: nn.Module) -> None:
        """Gives the shards memory and their initial values, which a module does not have that is on the meta device."""
        if self.initial is None:
            return
        place = torch.device("cpu") if self._offload else self.device
        # torch knows of the new memory, because its modules override `_apply`.
        self._root._apply(lambda each: torch.empty_like(each, device=place) if _is_empty(each) else each)
        self.initial.fill(module, self.device)

    def _found(self, module: nn.Module) -> list[nn.Module]:
        """The units, each behind those within it: what is already shared out is no parameter of the outer one's."""
        if self._units:
            found = [unit for unit in module.modules() if isinstance(unit, self._units)]
        else:
            lists = [within for within in module.modules() if isinstance(within, (nn.ModuleList, nn.Sequential))]
            found = [unit for within in lists for unit in within]
        units = {unit for unit in found if any(True for _ in unit.parameters()) and not _is_tied(unit, module)}
        return [unit for unit in reversed(list(module.modules())) if unit in units]

    def accumulating(self) -> AbstractContextManager[Any]:
        return self._unsynchronised()

    @contextmanager
    def _unsynchronised(self) -> Any:
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._root.set_requires_gradient_sync(True)

    def partial_gradients(self) -> dict[str, Tensor]:
        held: dict[str, Tensor] = {}
        for parameters in self._whole():
            held.update({name: p.grad for name, p in parameters.items() if p.grad is not None})
        return held

    def put_partial_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        for parameters in self._whole():
            for name, p in parameters.items():
                if name in gradients:
                    p.grad = gradients[name].to(p.device)

    def _whole(self) -> Iterator[dict[str, nn.Parameter]]:
        """The parameters of one unit after the other while they are whole: those are what gradients are of until they
        meet, and they keep them when they are given up."""
        from torch.distributed.fsdp import FSDPModule

        self._root._get_fsdp_state()._lazy_init()  # what the first forward pass does; gathering needs it
        for unit in self._root.modules():
            if isinstance(unit, FSDPModule):
                unit.unshard()
                yield {name: p for name, p in self.module.named_parameters() if not is_sharded(p)}
                unit.reshard()

    def weights_changed(self) -> None:
        self.reshard()  # the next forward pass gathers what was written

    def reshard(self) -> None:
        # A forward pass without a backward pass leaves the root's parameters gathered.
        from torch.distributed.fsdp import FSDPModule

        for unit in self._root.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()

    def clip(self, max_norm: float | None) -> Tensor:
        norm = super().clip(max_norm)
        return whole(norm)

    def alone(self, batch: Any) -> Any:
        raise InvalidSetup(
            "out_of_memory='retry' and 'split' need steps that run without the other processes: with fsdp use 'raise'"
        )

    def settle(self) -> None:
        for buffer in self.module.buffers():
            dist.broadcast(buffer, 0)


def _cast_by_autocast(module: nn.Module) -> set[int]:
    """The parameters that autocast converts wherever they are used: gathered in that format, they give the same bits
    and are half as large. All others, such as those of norms, stay in their own format, which some operations need."""
    users: dict[int, list[nn.Module]] = {}
    for part in module.modules():
        for p in part.parameters(recurse=False):
            users.setdefault(id(p), []).append(part)
    return {key for key, parts in users.items() if all(type(part) in _CAST for part in parts)}


_CAST = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


def _check_parameters(unit: nn.Module) -> None:
    if empty := [name for name, p in unit.named_parameters() if _own(p) and not p.numel()]:
        raise InvalidSetup(
            f"{empty[0]} has no elements, and fsdp cannot add gradients of such a parameter: freeze it "
            "(requires_grad_(False)), or leave it out"
        )
    named = {str(p.dtype).removeprefix("torch."): n for n, p in unit.named_parameters() if _own(p)}
    if len(named) > 1:
        (one, first), (other, second) = list(named.items())[:2]
        raise InvalidSetup(
            f"{first} is {one} and {second} is {other}, and fsdp keeps the parameters of a unit in one format: convert "
            "the module to one, for instance with .float(), or name units=[...] that have one each"
        )


def _own(p: nn.Parameter) -> bool:
    """Whether it is trained and belongs to no inner unit."""
    return p.requires_grad and not is_sharded(p)


def _is_empty(tensor: Tensor) -> bool:
    return tensor.is_meta and is_sharded(tensor)


def _is_tied(unit: nn.Module, module: nn.Module) -> bool:
    """Whether a parameter of the unit is also one of a submodule outside of it. torch refuses a parameter in two
    groups, so it is left to a unit that has both."""
    within, inside = set(unit.modules()), set(unit.parameters())
    outside = (p for part in module.modules() if part not in within for p in part._parameters.values())
    return any(p in inside for p in outside)
