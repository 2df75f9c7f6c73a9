"""Data parallel: every process has the whole module and a part of each batch."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from trainkit.errors import InvalidSetup, InvalidStep
from trainkit.precision import Precision
from trainkit.strategies.base import Strategy, TrainingStep, chosen
from trainkit.strategies.gloo import release_tensors


class Distributed(Strategy):
    """What all strategies of several processes share: how they meet, add and tell each other."""

    _owns_group = False

    def open(self, device: torch.device | str | None) -> None:
        if not dist.is_initialized():
            self.device = chosen(device, int(os.environ.get("LOCAL_RANK", "0")))
            dist.init_process_group(backend=_backend(self.device))
            self._owns_group = True
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
        self.device = chosen(device, self.local_rank)
        if self.device.type != "cpu":
            index: int | None = self.device.index
            if index is None:  # of the type that was asked for, this process has its own
                self.device = torch.device(self.device.type, self.local_rank % torch.accelerator.device_count())
            torch.accelerator.set_device_index(self.device)
            if self._owns_group:
                self._refuse_shared_device()

    def _refuse_shared_device(self) -> None:
        """Raises InvalidSetup if two processes have one device: NCCL and the like need one for each."""
        properties = torch.get_device_module(self.device).get_device_properties(self.device)
        places = self.gather((socket.gethostname(), str(getattr(properties, "uuid", self.device))))
        if shared := [rank for rank, place in enumerate(places) if places.count(place) > 1]:
            count = torch.accelerator.device_count()
            raise InvalidSetup(
                f"ranks {', '.join(map(str, shared))} share a {self.device.type} device, and each needs its own: start "
                f"{count} process(es) on a machine like this one, for instance with torchrun --nproc-per-node {count}, "
                "or train on the CPU with device='cpu'"
            )

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def counts(self, value: int) -> list[int]:
        on_host = torch.device("cpu") in dist.distributed_c10d._get_default_group()._device_types
        values = torch.zeros(self.world_size, dtype=torch.int64, device="cpu" if on_host else self.device)
        values[self.rank] = value
        dist.all_reduce(values)
        return values.tolist()

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        if self._owns_group and dist.is_initialized():
            release_tensors()
            dist.destroy_process_group()
            self._owns_group = False


class DDP(Distributed):
    """torch's DistributedDataParallel.

    Args:
        find_unused: look for parameters that a step did not use. Needed when steps use different parts of the module.
        bucket_mb: gradients are sent in pieces of this size, in MiB.
        wrapped: False: steps run past torch's wrapper, and trainkit averages the gradients at the end of a window.
        communication_hook: `(state, hook)` for `DistributedDataParallel.register_comm_hook`, for instance to compress.
    """

    name: ClassVar[str] = "ddp"

    def __init__(
        self,
        *,
        find_unused: bool = False,
        bucket_mb: float = 25,
        wrapped: bool = True,
        communication_hook: tuple[object, Callable[..., Any]] | None = None,
    ) -> None:
        self._find_unused, self._bucket_mb, self._hook = find_unused, bucket_mb, communication_hook
        self._wrapped, self._accumulating, self._apart = wrapped, False, False
        self._looks = wrapped and not find_unused

    def prepare(self, module: nn.Module, precision: Precision) -> None:
        self.module, self.precision = self.placed(module), precision
        step = TrainingStep(self.module, precision)
        self._step = _Settling(step)
        self.evaluate = partial(step, evaluate=True)
        self._parameters = list(self.module.parameters())
        self._replica = self._made_replica(first=True)
        self.forward = self._in_replica if self._wrapped else self._bare

    def _made_replica(self, *, first: bool) -> DistributedDataParallel:
        """torch's wrapper, which averages what is trained now."""
        self._trained = [p.requires_grad for p in self._parameters]
        replica = DistributedDataParallel(
            self._step,
            device_ids=[self.device.index] if self.device.type != "cpu" else None,
            find_unused_parameters=self._find_unused,
            bucket_cap_mb=self._bucket_mb,
            init_sync=first,
        )
        if self._hook is not None:
            replica.register_comm_hook(*self._hook)
        self._settle_buckets(replica)
        return replica

    def trained_changed(self) -> None:
        self._follow_trained()

    def _in_replica(self, batch: Any) -> Any:
        self._follow_trained()
        return self._replica(batch)

    def _follow_trained(self) -> None:
        """Makes torch's wrapper again when parameters were frozen or unfrozen, on every process: it averages those that
        were trained when it was made."""
        if [p.requires_grad for p in self._parameters] == self._trained:
            return
        before, gradients = self._replica, [p.grad for p in self._parameters]
        before.reducer._remove_autograd_hooks()
        self._replica = self._made_replica(first=False)
        self._replica.require_forward_param_sync = before.require_forward_param_sync
        for p, gradient in zip(self._parameters, gradients, strict=True):
            p.grad = gradient
        self._looks = self._wrapped and not self._find_unused

    def _settle_buckets(self, replica: DistributedDataParallel) -> None:
        """DDP cuts its buckets anew after the first backward pass, in the order in which gradients came, and the cut
        decides in which order processes are added. We let it happen before training, in a fixed order, so that a run
        that was started again adds as the first one did."""
        if self._find_unused or self._hook is not None:
            return
        for _ in range(2):
            replica(_Settling.PASS).backward()
        self.module.zero_grad()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        if self._wrapped:
            self._follow_trained()
        self._accumulating = True
        try:
            with self._replica.no_sync():
                yield
        finally:
            self._accumulating = False

    def step(self, optimizer: Optimizer) -> bool:
        if self._looks:  # once, before the first update: torch tells of it in the next step, when weights went apart
            self._looks = False
            self._refuse_unused()
        return super().step(optimizer)

    def _refuse_unused(self) -> None:
        named = self.module.named_parameters()
        if unused := [name for name, p in named if p.requires_grad and p.grad is None]:
            raise InvalidStep(
                f"training_step made no gradient for {', '.join(unused[:5])}, for which ddp waits: freeze what is not "
                "used (requires_grad_(False)), or, when steps use different parts, give strategy=DDP(find_unused=True)"
            )

    def alone(self, batch: Any) -> Any:
        self._looks = False
        if not self._wrapped:
            return self._step(batch)
        with self._replica.no_sync():
            self._replica.require_forward_param_sync = False  # it would send buffers
            return self._replica(batch)

    def _bare(self, batch: Any) -> Any:
        self._apart = not self._accumulating
        return self._step(batch)

    def backward(self, loss: Tensor, **options: Any) -> None:
        super().backward(loss, **options)
        if self._apart:  # the last step of a window, whose gradients did not meet on the way
            self._apart = False
            self.synchronise()

    def synchronise(self) -> None:
        trained = [p for p in self.module.parameters() if p.requires_grad]
        users = self.sum(torch.tensor([p.grad is not None for p in trained], dtype=torch.int32, device=self.device))
        gradients: list[Tensor] = []
        for p, used in zip(trained, users.tolist(), strict=True):
            if used:  # what no process used has no gradient, as on one process: optimizers leave it alone
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                gradients.append(p.grad)
        for bucket in _buckets(gradients, int(self._bucket_mb * 2**20)):
            self._average(bucket)

    @torch.no_grad()
    def _average(self, bucket: list[Tensor]) -> None:
        if len(bucket) == 1:
            self.sum(bucket[0]).div_(self.world_size)
            return
        flat = self.sum(torch.cat([gradient.reshape(-1) for gradient in bucket])).div_(self.world_size)
        parts = flat.split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_(bucket, [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)])

    def put_partial_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        super().put_partial_gradients(gradients)
        self._replica.require_forward_param_sync = False  # buffers were sent at the window's first step

    def settle(self) -> None:
        # The next forward pass would do the same: the first process's statistics count.
        for buffer in self.module.buffers():
            dist.broadcast(buffer, 0)


def _buckets(gradients: Iterable[Tensor], most_bytes: int) -> Iterator[list[Tensor]]:
    """Gradients that can be sent as one tensor, in their order: of one kind, and of at most so many bytes together.
    A larger or a sparse one is alone. The cut follows from the gradients only, so it is the same on every process."""
    begun: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    held_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    for gradient in gradients:
        if gradient.layout != torch.strided:
            yield [gradient]
            continue
        kind = (gradient.dtype, gradient.device)
        if kind in begun and held_bytes[kind] + gradient.nbytes > most_bytes:
            yield begun.pop(kind)
        if kind not in begun:
            begun[kind], held_bytes[kind] = [], 0
        begun[kind].append(gradient)
        held_bytes[kind] += gradient.nbytes
    yield from begun.values()


class _Settling(nn.Module):
    """A training step that can also be asked for a pass through all parameters, the last one first."""

    PASS: ClassVar[str] = "settle"

    def __init__(self, step: TrainingStep) -> None:
        super().__init__()
        self.step = step

    def forward(self, batch: Any) -> Any:
        if batch is not _Settling.PASS:
            return self.step(batch)
        total: Any = 0.0
        for parameter in self.parameters():
            if parameter.requires_grad:
                nothing = parameter.reshape(-1)[:1].sum() * 0
                total = total + (nothing.real if nothing.is_complex() else nothing)
        return total


def _backend(device: torch.device) -> str:
    """NCCL and the like for the device, gloo for what is on the host."""
    return "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
